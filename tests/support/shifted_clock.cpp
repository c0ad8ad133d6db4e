// Moves the date that a program sees by CLOCK_SHIFT_S seconds, when it is preloaded. faketime 0.9.10 does not serve:
// with it, Python 3.11 cannot wait on the monotonic clock (sem_clockwait and clock_nanosleep fail or never return).
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

extern "C" int clock_gettime(clockid_t clock, struct timespec *now) noexcept {
  long failed = syscall(SYS_clock_gettime, clock, now);
  const char *shift_s = getenv("CLOCK_SHIFT_S");
  if (!failed && clock == CLOCK_REALTIME && shift_s) now->tv_sec += atol(shift_s);
  return static_cast<int>(failed);
}

extern "C" int gettimeofday(struct timeval *now, void *) noexcept {
  struct timespec shifted;
  int failed = clock_gettime(CLOCK_REALTIME, &shifted);
  now->tv_sec = shifted.tv_sec;
  now->tv_usec = shifted.tv_nsec / 1000;
  return failed;
}

extern "C" time_t time(time_t *now) noexcept {
  struct timespec shifted;
  clock_gettime(CLOCK_REALTIME, &shifted);
  if (now) *now = shifted.tv_sec;
  return shifted.tv_sec;
}
