// What the other files need of the C++ runtime. With libstdc++ inside, the library would need the newest glibc; with
// this it needs one of 2013. Nothing here throws: without memory a kernel ends its process, as the engine would.
#include <cstddef>
#include <cstdlib>

void* operator new(size_t bytes) {
  void* memory = malloc(bytes ? bytes : 1);
  if (!memory) abort();
  return memory;
}

void operator delete(void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }

namespace std {
[[noreturn]] void __throw_length_error(const char*) { abort(); }
[[noreturn]] void __throw_bad_array_new_length() { abort(); }
[[noreturn]] void __throw_bad_alloc() { abort(); }
}  // namespace std

extern "C" {
int __cxa_thread_atexit_impl(void (*end)(void*), void* object, void* library);
int __cxa_thread_atexit(void (*end)(void*), void* object, void* library) {
  return __cxa_thread_atexit_impl(end, object, library);
}
}
