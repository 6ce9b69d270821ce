/* A wall clock that a test moves: preloaded, it adds the seconds (int64) in the file that WALL_CLOCK_OFFSET names. Timers
   that wait until a time of the wall clock are not changed; the monotonic clock is not touched. libfaketime does the same,
   but makes the engine ten times slower. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset_s;
static const int64_t no_offset_s;

__attribute__((constructor)) static void map_offset(void) {
    const char *name = getenv("WALL_CLOCK_OFFSET");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *offset_s, PROT_READ, MAP_SHARED, file, 0);
    offset_s = page == MAP_FAILED ? &no_offset_s : page;
    if (file >= 0) close(file);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int code = (int)syscall(SYS_clock_gettime, id, now);
    if (code == 0 && offset_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset_s;
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int code = (int)syscall(SYS_gettimeofday, now, zone);
    if (code == 0 && offset_s) now->tv_sec += *offset_s;
    return code;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}
