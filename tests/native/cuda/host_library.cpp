// The kernels as a library, which host_build.py compiles.
#include "shim.hpp"
#include KERNELS
#include "host_launch.hpp"
