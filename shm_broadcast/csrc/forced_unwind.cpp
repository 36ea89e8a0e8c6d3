// Parks a thread that Python ends while it is inside of this module.
//
// When the interpreter exits, Python 3.11 to 3.13 end a daemon thread at the moment at which it takes the GIL again, by
// `pthread_exit`. That unwinds the thread's stack, and so runs the destructors of our frames on a thread that does not hold the
// GIL, while other threads take the interpreter apart: they would decrement reference counts and free memory, and the process
// would crash. Any call into Python can take the GIL, not only those that release it here.
//
// The unwinder asks the personality routine of every frame that has destructors or handlers before it runs any of them. The
// module is linked with `--wrap=__gxx_personality_v0`, and so asks the routine below, which never returns from such an unwinding.
// The thread sleeps until the process has ended. It holds no lock. Python 3.14 does the same by itself.
#include <unistd.h>
#include <unwind.h>

extern "C" {

// It is weak, as a program that links this file without the option has none, and then never calls the routine below.
[[gnu::weak]] _Unwind_Reason_Code __real___gxx_personality_v0(int version, _Unwind_Action actions,
                                                             _Unwind_Exception_Class kind, _Unwind_Exception* exception,
                                                             _Unwind_Context* context);

_Unwind_Reason_Code __wrap___gxx_personality_v0(int version, _Unwind_Action actions, _Unwind_Exception_Class kind,
                                                _Unwind_Exception* exception, _Unwind_Context* context) {
    while ((actions & _UA_FORCE_UNWIND) != 0) pause();
    return __real___gxx_personality_v0(version, actions, kind, exception, context);
}

}  // extern "C"
