// The kernels as a library: see host_build.py.
#include "shim.hpp"
#include KERNELS
#include "host_launch.hpp"
