// The AMX row of the kernel tables: the tile instructions, and asking the system for them.
#include "cpu/amx_kernel.hpp"
#include "cpu/bf16_features.hpp"
#include "cpu/kernel.hpp"

#if defined(MLA_CPU_BF16) && defined(__linux__)

#include <sys/syscall.h>
#include <unistd.h>

namespace mla::cpu {
namespace {

/// The machine's own tiles. The instructions are written out because the compilers' intrinsics take
/// literal tile numbers only. Every asm clobbers memory, so none moves across another or across the
/// vector code that fills and reads the same arrays.
class HardwareTiles {
 public:
  HardwareTiles() {
    alignas(64) TileConfig config{};
    config.palette = 1;
    for (int t = 0; t < 8; ++t) {
      config.row_bytes[t] = 64;
      config.rows[t] = 16;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  ~HardwareTiles() { __asm__ volatile("tilerelease" : : : "memory"); }
  HardwareTiles(const HardwareTiles&) = delete;
  HardwareTiles& operator=(const HardwareTiles&) = delete;

  template <int kTile>
  __attribute__((always_inline)) void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  __attribute__((always_inline)) void load(const void* memory, std::int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                     :
                     : "r"(memory), "r"(stride), "i"(kTile)
                     : "memory");
  }
  template <int kTile>
  __attribute__((always_inline)) void store(void* memory, std::int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                     :
                     : "r"(memory), "r"(stride), "i"(kTile)
                     : "memory");
  }
  template <int kSum, int kA, int kB>
  __attribute__((always_inline)) void dot() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
  }

 private:
  struct TileConfig {
    std::uint8_t palette;
    std::uint8_t start_row;
    std::uint8_t reserved[14];
    std::uint16_t row_bytes[16];
    std::uint8_t rows[16];
  };
  static_assert(sizeof(TileConfig) == 64);
};

void run_split(const CallView& call, const SplitJob& job, std::byte* scratch) {
  if (job.few_rows) {
    avx512_kernels()->run_split(call, job, scratch);
  } else {
    bf16::run_amx_split<HardwareTiles>(call, job, scratch);
  }
}

std::size_t scratch_bytes(std::int64_t kv_lora_rank, std::int64_t qk_rope_head_dim) {
  return std::max(bf16::scratch_size(kv_lora_rank, qk_rope_head_dim),
                  avx512_kernels()->scratch_bytes(kv_lora_rank, qk_rope_head_dim));
}

/// Tile state is large, so Linux gives it only to processes that ask; the permission holds for all
/// threads of the process.
bool request_tile_state() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

}  // namespace

const KernelTable* amx_kernels() noexcept {
  const KernelTable* base = avx512_kernels();
  if (base == nullptr) return nullptr;
  static const bool available = bf16::cpu_has_amx_bf16() && request_tile_state();
  if (!available) return nullptr;
  static const KernelTable table{"amx",     bf16::kKeyTile,  scratch_bytes,
                                 run_split, base->store_row, base->merge_row};
  return &table;
}

}  // namespace mla::cpu

#else

namespace mla::cpu {
const KernelTable* amx_kernels() noexcept {
  return nullptr;
}
}  // namespace mla::cpu

#endif
