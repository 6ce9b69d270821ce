// The limits of this machine: read bandwidth of the memory, and products per second that are in registers already.
// Prints one line "name value" for each; GB/s and G operations/s, a multiplication and an addition counting two.
// limits.py compiles it with the flags of one class of processors. Usage: limits THREADS
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#ifdef __x86_64__
#include <immintrin.h>
#endif
#ifdef __AMX_TILE__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int kRuns = 25;  // the fastest counts: other programs only make a run slower
constexpr size_t kBytes = size_t(1) << 30;
constexpr long kRounds = 2'000'000;
constexpr int kChains = 12;  // independent accumulators, enough for the latency of every instruction here

#ifdef __AVX512F__
constexpr int kWidth = 64;
#else
constexpr int kWidth = 32;
#endif
typedef int64_t Words __attribute__((vector_size(kWidth)));
typedef float Floats __attribute__((vector_size(kWidth)));

template <typename Run>
double best_s(Run run) {
  double best = 1e30;
  for (int i = 0; i < kRuns; i++) {
    double start = omp_get_wtime();
    run();
    best = std::min(best, omp_get_wtime() - start);
  }
  return best;
}

volatile int64_t sink;

double read_s(const char* memory, int threads) {
  return best_s([&] {
    int64_t sum = 0;
#pragma omp parallel num_threads(threads) reduction(+ : sum)
    {
      const size_t share = kBytes / threads / 4096 * 4096;
      const Words* words = reinterpret_cast<const Words*>(memory + omp_get_thread_num() * share);
      Words sums[8] = {};
      for (size_t i = 0; i < share / kWidth; i += 8)
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) sums[j] += words[i + j];
#pragma GCC unroll 8
      for (int j = 1; j < 8; j++) sums[0] += sums[j];
      for (size_t j = 0; j < kWidth / 8; j++) sum += sums[0][j];
    }
    sink = sum;
  });
}

// Run `chain` kRounds times in every thread, where each call is kChains instructions of `operations` operations.
template <typename Chain>
double peak(int threads, double operations, Chain chain) {
  double seconds = best_s([&] {
#pragma omp parallel num_threads(threads)
    chain();
  });
  return double(kRounds) * kChains * operations * threads / seconds / 1e9;
}

// Named accumulators, because gcc keeps an array of them in memory. Each is the operand of an empty statement, so that
// the compiler keeps every product.
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define START(number) auto sum##number = start;
#define STEP(number)             \
  sum##number = step(sum##number); \
  asm volatile("" : "+v"(sum##number));

template <typename Vector, typename Step>
inline __attribute__((always_inline)) void run_chains(Vector start, Step step) {
  EACH(START)
  for (long i = 0; i < kRounds; i++) {
    EACH(STEP)
  }
}

void fp32_chain() {
  Floats factor = Floats{} + 0.999f, addend = Floats{} + 0.001f;
#if defined(__AVX512F__)
  run_chains(_mm512_setzero_ps(), [&](__m512 sum) { return _mm512_fmadd_ps(sum, factor, addend); });
#elif defined(__FMA__)
  run_chains(_mm256_setzero_ps(), [&](__m256 sum) { return _mm256_fmadd_ps(sum, factor, addend); });
#else
  Floats sums[kChains] = {};
  for (long i = 0; i < kRounds; i++)
    for (int j = 0; j < kChains; j++) sums[j] = sums[j] * factor + addend;
  sink = int64_t(sums[0][0] + sums[kChains - 1][0]);
#endif
}

#ifdef __AVX512BF16__
void bf16_chain() {
  __m512bh factor = (__m512bh)_mm512_set1_epi16(0x3f80);
  run_chains(_mm512_setzero_ps(), [&](__m512 sum) { return _mm512_dpbf16_ps(sum, factor, factor); });
}
#endif

#ifdef __AVX512VNNI__
void int8_chain() {
  __m512i factor = _mm512_set1_epi8(1);
  run_chains(_mm512_setzero_si512(), [&](__m512i sum) { return _mm512_dpbusd_epi32(sum, factor, factor); });
}
#endif

#ifdef __AMX_TILE__
constexpr int kTileRows = 16, kTileBytes = 64;
constexpr long kTileRounds = 300'000;

bool allow_tiles() {
  const int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

void configure_tiles() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 8; tile++) config.bytes[tile] = kTileBytes, config.rows[tile] = kTileRows;
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
}

template <typename Products>
double tile_peak(int threads, double operations, Products products) {
  double seconds = best_s([&] {
#pragma omp parallel num_threads(threads)
    {
      configure_tiles();
      for (long i = 0; i < kTileRounds; i++) products();
      _tile_release();
    }
  });
  return double(kTileRounds) * 4 * operations * threads / seconds / 1e9;
}
#endif

}  // namespace

int main(int count, char** words) {
  const int threads = count > 1 ? std::atoi(words[1]) : omp_get_max_threads();
  char* memory = static_cast<char*>(std::aligned_alloc(4096, kBytes));
  if (memory == nullptr) return std::fprintf(stderr, "no memory for a buffer of 1 GiB\n"), 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (size_t at = 0; at < kBytes; at += 4096) std::memset(memory + at, 1, 4096);
  std::printf("read_gb_s %g\n", kBytes / read_s(memory, threads) / 1e9);
  std::printf("read_one_thread_gb_s %g\n", kBytes / read_s(memory, 1) / 1e9);
  std::free(memory);
  std::printf("fp32_gflop_s %g\n", peak(threads, 2.0 * kWidth / 4, fp32_chain));
#ifdef __AVX512BF16__
  std::printf("bf16_gflop_s %g\n", peak(threads, 2.0 * kWidth / 2, bf16_chain));
#endif
#ifdef __AVX512VNNI__
  std::printf("int8_gop_s %g\n", peak(threads, 2.0 * kWidth, int8_chain));
#endif
#ifdef __AMX_TILE__
  if (!allow_tiles()) return std::fprintf(stderr, "the system does not allow AMX tiles\n"), 1;
  std::printf("amx_bf16_gflop_s %g\n", tile_peak(threads, 2.0 * kTileRows * 16 * 32, [] {
                _tile_dpbf16ps(0, 4, 5);
                _tile_dpbf16ps(1, 4, 6);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 6);
              }));
  std::printf("amx_int8_gop_s %g\n", tile_peak(threads, 2.0 * kTileRows * 16 * 64, [] {
                _tile_dpbusd(0, 4, 5);
                _tile_dpbusd(1, 4, 6);
                _tile_dpbusd(2, 4, 7);
                _tile_dpbusd(3, 5, 6);
              }));
#endif
}
