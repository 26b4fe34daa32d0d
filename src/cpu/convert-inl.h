// Storage types <-> f32, in blocks of 16 values. Decoding is exact and keeps every NaN code;
// encoding rounds to nearest even, bit for bit as core/numeric.hpp does.
//
// Included once per target by highway_kernels.cpp.
#if defined(MLA_CPU_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLA_CPU_CONVERT_INL_H_
#undef MLA_CPU_CONVERT_INL_H_
#else
#define MLA_CPU_CONVERT_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/kv_layout.hpp"
#include "core/numeric.hpp"
#include "cpu/key_tile.hpp"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// One f32 vector: 16, 8, 4 or 1 lanes, a divisor of kBlock.
using Wide = hn::CappedTag<float, kBlock>;
using WideVec = hn::Vec<Wide>;
inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(Wide()));
static_assert(kBlock % kLanes == 0);

// Targets whose f16 -> f32 conversion is one exact instruction, subnormals and NaN included.
#define MLA_HAS_F16C (HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3)

/// Loads from any address; the pointer of a one-lane target must not be dereferenced unaligned.
template <class D>
HWY_INLINE hn::Vec<D> load_bytes(D d, const std::byte* source) {
  using T = hn::TFromD<D>;
  if constexpr (hn::MaxLanes(D()) == 1) {
    T value;
    std::memcpy(&value, source, sizeof(value));
    return hn::Set(d, value);
  } else {
    return hn::LoadU(d, reinterpret_cast<const T*>(source));
  }
}

HWY_INLINE void bf16_block(const std::byte* source, float* HWY_RESTRICT out) {
  const Wide d;
  const hn::RebindToUnsigned<Wide> du32;
  const hn::Rebind<std::uint16_t, Wide> du16;
  for (int i = 0; i < kBlock; i += kLanes) {
    const auto bits = hn::PromoteTo(du32, load_bytes(du16, source + 2 * i));
    hn::Store(hn::BitCast(d, hn::ShiftLeft<16>(bits)), d, out + i);
  }
}

#if MLA_HAS_F16C

template <class D>
HWY_INLINE hn::Vec<D> f16_vector(D d, const std::byte* source) {
  const hn::Rebind<hwy::float16_t, D> df16;
  const hn::Rebind<std::uint16_t, D> du16;
  return hn::PromoteTo(d, hn::BitCast(df16, load_bytes(du16, source)));
}

using BlockU16 = hn::CappedTag<std::uint16_t, kBlock>;

// An e4m3 code moved to the top of an f16 has 2^-8 of its value: the exponents have 4 and 5 bits.
// The sign-extending shift puts a copy of the sign where f16 has its highest exponent bit.
inline constexpr float kE4M3Factor = 256.0F;

HWY_INLINE hn::Vec<BlockU16> e4m3_as_f16(const std::byte* source) {
  const BlockU16 du16;
  const hn::RebindToSigned<BlockU16> di16;
  const hn::Rebind<std::uint8_t, BlockU16> du8;
  const auto code = hn::PromoteTo(du16, load_bytes(du8, source));
  const auto spread = hn::ShiftRight<1>(hn::BitCast(di16, hn::ShiftLeft<8>(code)));
  const auto half = hn::And(hn::BitCast(du16, spread), hn::Set(du16, std::uint16_t{0xBFFF}));
  const auto all_ones = hn::Set(du16, std::uint16_t{0x7F});
  const auto is_nan = hn::Eq(hn::And(code, all_ones), all_ones);
  return hn::Or(half, hn::IfThenElseZero(is_nan, hn::Set(du16, std::uint16_t{0x7E00})));
}

HWY_INLINE void e4m3_block(const std::byte* source, float scale, float* HWY_RESTRICT out) {
  const Wide d;
  const auto factor = hn::Set(d, scale * kE4M3Factor);
#if HWY_TARGET == HWY_AVX3  // 16 lanes
  const hn::Rebind<hwy::float16_t, Wide> df16;
  const auto value = hn::PromoteTo(d, hn::BitCast(df16, e4m3_as_f16(source)));
  hn::Store(hn::Mul(value, factor), d, out);
#else
  const hn::Rebind<hwy::float16_t, Wide> df16;
  const hn::Rebind<std::uint16_t, Wide> du16;
  const auto half = e4m3_as_f16(source);
  const auto low = hn::PromoteTo(d, hn::BitCast(df16, hn::LowerHalf(du16, half)));
  const auto high = hn::PromoteTo(d, hn::BitCast(df16, hn::UpperHalf(du16, half)));
  hn::Store(hn::Mul(low, factor), d, out);
  hn::Store(hn::Mul(high, factor), d, out + kLanes);
#endif
}

#else  // !MLA_HAS_F16C

// A small float with kMantissa fraction bits in the low bits of `code`, widened by integers: the
// exponent is rebased by an addition, subnormals are integers times a power of two. No f32
// subnormal appears, so a caller's denormals-are-zero mode changes nothing.
template <int kMantissa, int kBias, class D, class VU>
HWY_INLINE hn::Vec<D> widen_magnitude(D d, VU magnitude) {
  const hn::RebindToUnsigned<D> du32;
  const hn::RebindToSigned<D> di32;
  const auto rebased = hn::Add(hn::ShiftLeft<23 - kMantissa>(magnitude),
                               hn::Set(du32, static_cast<std::uint32_t>(127 - kBias) << 23));
  const float unit = numeric::bits_to_float(static_cast<std::uint32_t>(127 - kBias + 1 - kMantissa)
                                            << 23);  // smallest subnormal
  const auto integer = hn::ConvertTo(d, hn::BitCast(di32, magnitude));
  const auto is_normal =
      hn::Gt(hn::BitCast(di32, magnitude), hn::Set(di32, (std::int32_t{1} << kMantissa) - 1));
  return hn::IfThenElse(hn::RebindMask(d, is_normal), hn::BitCast(d, rebased),
                        hn::Mul(integer, hn::Set(d, unit)));
}

template <class D>
HWY_INLINE hn::Vec<D> f16_vector(D d, const std::byte* source) {
  const hn::RebindToUnsigned<D> du32;
  const hn::RebindToSigned<D> di32;
  const hn::Rebind<std::uint16_t, D> du16;
  const auto code = hn::PromoteTo(du32, load_bytes(du16, source));
  const auto magnitude = hn::And(code, hn::Set(du32, 0x7FFFU));
  const auto sign = hn::ShiftLeft<16>(hn::And(code, hn::Set(du32, 0x8000U)));
  const auto special = hn::BitCast(
      d, hn::Or(hn::ShiftLeft<13>(magnitude), hn::Set(du32, 0x7F800000U)));  // infinity or NaN
  const auto is_special = hn::Gt(hn::BitCast(di32, magnitude), hn::Set(di32, 0x7BFF));
  const auto value =
      hn::IfThenElse(hn::RebindMask(d, is_special), special, widen_magnitude<10, 15>(d, magnitude));
  return hn::Or(value, hn::BitCast(d, sign));
}

template <class D>
HWY_INLINE hn::Vec<D> e4m3_vector(D d, const std::byte* source) {
  const hn::RebindToUnsigned<D> du32;
  const hn::Rebind<std::uint8_t, D> du8;
  const auto code = hn::PromoteTo(du32, load_bytes(du8, source));
  const auto magnitude = hn::And(code, hn::Set(du32, 0x7FU));
  const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(du32, 0x80U)));
  const auto nan = hn::BitCast(d, hn::Set(du32, 0x7FC00000U));
  const auto is_nan = hn::Eq(magnitude, hn::Set(du32, 0x7FU));
  const auto value =
      hn::IfThenElse(hn::RebindMask(d, is_nan), nan, widen_magnitude<3, 7>(d, magnitude));
  return hn::Or(value, hn::BitCast(d, sign));
}

HWY_INLINE void e4m3_block(const std::byte* source, float scale, float* HWY_RESTRICT out) {
  const Wide d;
  for (int i = 0; i < kBlock; i += kLanes) {
    hn::Store(hn::Mul(e4m3_vector(d, source + i), hn::Set(d, scale)), d, out + i);
  }
}

#endif  // MLA_HAS_F16C

HWY_INLINE void f16_block(const std::byte* source, float* HWY_RESTRICT out) {
  const Wide d;
  for (int i = 0; i < kBlock; i += kLanes) hn::Store(f16_vector(d, source + 2 * i), d, out + i);
}

/// `count` values (a multiple of 16) of a plain type: block b goes to out + b * block_stride.
HWY_INLINE void decode_values(DType dtype, const std::byte* HWY_RESTRICT source, std::int64_t count,
                              float* HWY_RESTRICT out, std::int64_t block_stride) {
  const std::int64_t num_blocks = count / kBlock;
  switch (dtype) {
    case DType::kBF16:
      for (std::int64_t b = 0; b < num_blocks; ++b) {
        bf16_block(source + b * (2 * kBlock), out + b * block_stride);
      }
      return;
    case DType::kF16:
      for (std::int64_t b = 0; b < num_blocks; ++b) {
        f16_block(source + b * (2 * kBlock), out + b * block_stride);
      }
      return;
    case DType::kE4M3:
      for (std::int64_t b = 0; b < num_blocks; ++b) {
        e4m3_block(source + b * kBlock, 1.0F, out + b * block_stride);
      }
      return;
    default: return;  // refused by validation
  }
}

/// One cached token, latent and rope, with the scales of its record applied.
HWY_NOINLINE void decode_token(KvFormat format, const std::byte* HWY_RESTRICT source,
                               std::int64_t head_dim, float* HWY_RESTRICT out,
                               std::int64_t block_stride) {
  switch (format) {
    case KvFormat::kBF16: return decode_values(DType::kBF16, source, head_dim, out, block_stride);
    case KvFormat::kF16: return decode_values(DType::kF16, source, head_dim, out, block_stride);
    case KvFormat::kE4M3: return decode_values(DType::kE4M3, source, head_dim, out, block_stride);
    case KvFormat::kFp8DsMla: break;
  }
  constexpr std::int64_t kBlocksPerScale = fp8_ds_mla::kScaleGroup / kBlock;
  for (std::int64_t g = 0; g < fp8_ds_mla::kNumScales; ++g) {
    float scale;
    std::memcpy(&scale, source + fp8_ds_mla::kScaleOffset + 4 * g, sizeof(scale));
    for (std::int64_t b = g * kBlocksPerScale; b < (g + 1) * kBlocksPerScale; ++b) {
      e4m3_block(source + b * kBlock, scale, out + b * block_stride);
    }
  }
  decode_values(DType::kBF16, source + fp8_ds_mla::kRopeOffset, fp8_ds_mla::kRope,
                out + fp8_ds_mla::kRank / kBlock * block_stride, block_stride);
}

/// Latent and rope part of a query row times `factor`, contiguous.
HWY_INLINE void decode_query(const CallView& call, const SplitRow& row, float factor,
                             float* HWY_RESTRICT out) {
  const Wide d;
  decode_values(call.q_dtype, row.q_nope, call.kv_lora_rank, out, kBlock);
  decode_values(call.q_dtype, row.q_pe, call.qk_rope_head_dim, out + call.kv_lora_rank, kBlock);
  const auto scale = hn::Set(d, factor);
  const std::int64_t head_dim = call.kv_lora_rank + call.qk_rope_head_dim;
  for (std::int64_t i = 0; i < head_dim; i += kLanes) {
    hn::Store(hn::Mul(hn::Load(d, out + i), scale), d, out + i);
  }
}

// ---- f32 -> storage, one vector ----

using BitsVec = hn::Vec<hn::RebindToUnsigned<Wide>>;

template <class VU>
HWY_INLINE auto greater_u31(VU a, std::uint32_t limit) {  // both below 2^31
  const hn::RebindToSigned<Wide> di32;
  return hn::Gt(hn::BitCast(di32, a), hn::Set(di32, static_cast<std::int32_t>(limit)));
}

/// Picks by a signed-lane mask between unsigned vectors.
template <class M>
HWY_INLINE BitsVec select_bits(M mask, BitsVec yes, BitsVec no) {
  const hn::RebindToUnsigned<Wide> du32;
  return hn::IfThenElse(hn::RebindMask(du32, mask), yes, no);
}

/// A result that is -0 becomes +0.
HWY_INLINE BitsVec drop_negative_zero(BitsVec bits, std::uint32_t magnitude_mask) {
  const hn::RebindToUnsigned<Wide> du32;
  const auto magnitude = hn::And(bits, hn::Set(du32, magnitude_mask));
  return hn::IfThenElse(hn::Eq(magnitude, hn::Zero(du32)), hn::Zero(du32), bits);
}

HWY_INLINE BitsVec bf16_bits(WideVec value) {
  const hn::RebindToUnsigned<Wide> du32;
  const auto bits = hn::BitCast(du32, value);
  const auto upper = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(upper, hn::Set(du32, 1U));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du32, 0x7FFFU))));
  const auto is_nan = greater_u31(hn::And(bits, hn::Set(du32, 0x7FFFFFFFU)), 0x7F800000U);
  return select_bits(is_nan, hn::Or(upper, hn::Set(du32, 0x40U)), rounded);
}

HWY_INLINE BitsVec f16_bits(WideVec value) {
  const Wide d;
  const hn::RebindToUnsigned<Wide> du32;
  const auto bits = hn::BitCast(du32, value);
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 0x8000U));
  const auto magnitude = hn::And(bits, hn::Set(du32, 0x7FFFFFFFU));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du32, 1U));
  const auto bias = hn::Set(du32, 0x0FFFU - 0x38000000U);
  const auto normal = hn::ShiftRight<13>(hn::Add(magnitude, hn::Add(odd, bias)));
  // Adding 0.5 puts the last bit of a half subnormal (2^-24) at the last bit of the float.
  const auto shifted = hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5F));
  const auto subnormal = hn::Sub(hn::BitCast(du32, shifted), hn::Set(du32, 0x3F000000U));
  auto half = select_bits(greater_u31(magnitude, 0x387FFFFFU), normal, subnormal);
  half = select_bits(greater_u31(magnitude, 0x477FEFFFU), hn::Set(du32, 0x7C00U), half);
  half = select_bits(greater_u31(magnitude, 0x7F800000U), hn::Set(du32, 0x7E00U), half);
  return hn::Or(sign, half);
}

HWY_INLINE void store_u16(BitsVec bits, std::byte* out) {
  const hn::RebindToSigned<Wide> di32;
  const hn::Rebind<std::uint16_t, Wide> du16;
  hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di32, bits)), du16,
             reinterpret_cast<std::uint16_t*>(out));
}

inline void store_scalar(float value, DType dtype, std::byte* out) {
  std::uint16_t bits = 0;
  switch (dtype) {
    case DType::kF32: {
      const float clean = value == 0.0F ? 0.0F : value;
      std::memcpy(out, &clean, sizeof(clean));
      return;
    }
    case DType::kE4M3: {
      const std::uint8_t code = numeric::float_to_e4m3(value);
      *out = static_cast<std::byte>(code == 0x80U ? 0U : code);
      return;
    }
    case DType::kF16: bits = numeric::float_to_f16(value); break;
    default: bits = numeric::float_to_bf16(value); break;
  }
  if (bits == 0x8000U) bits = 0;
  std::memcpy(out, &bits, sizeof(bits));
}

/// KernelTable::store_row.
void store_row(const float* HWY_RESTRICT value, float factor, std::int64_t count, DType out_dtype,
               std::byte* HWY_RESTRICT out) {
  const Wide d;
  const hn::RebindToUnsigned<Wide> du32;
  const auto scale = hn::Set(d, factor);
  const auto item = static_cast<std::int64_t>(dtype_bytes(out_dtype));
  std::int64_t i = 0;
  if (out_dtype != DType::kE4M3) {
    for (; i + kLanes <= count; i += kLanes) {
      const auto product = hn::Mul(hn::LoadU(d, value + i), scale);
      if (out_dtype == DType::kBF16) {
        store_u16(drop_negative_zero(bf16_bits(product), 0x7FFFU), out + i * item);
      } else if (out_dtype == DType::kF16) {
        store_u16(drop_negative_zero(f16_bits(product), 0x7FFFU), out + i * item);
      } else {
        const auto bits = drop_negative_zero(hn::BitCast(du32, product), 0x7FFFFFFFU);
        hn::StoreU(hn::BitCast(d, bits), d, reinterpret_cast<float*>(out + i * item));
      }
    }
  }
  for (; i < count; ++i) store_scalar(value[i] * factor, out_dtype, out + i * item);
}

/// KernelTable::merge_row.
void merge_row(float* HWY_RESTRICT acc, float weight_acc, const float* HWY_RESTRICT value,
               float weight_value, std::int64_t count) {
  const Wide d;
  const auto wa = hn::Set(d, weight_acc);
  const auto wv = hn::Set(d, weight_value);
  const bool keeps_acc = weight_acc != 0.0F;
  const bool takes_value = weight_value != 0.0F;
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const auto kept = keeps_acc ? hn::Mul(wa, hn::LoadU(d, acc + i)) : hn::Zero(d);
    const auto sum = takes_value ? hn::MulAdd(wv, hn::LoadU(d, value + i), kept) : kept;
    hn::StoreU(sum, d, acc + i);
  }
  const hn::CappedTag<float, 1> d1;
  for (; i < count; ++i) {
    const auto kept =
        keeps_acc ? hn::Mul(hn::Set(d1, weight_acc), hn::LoadU(d1, acc + i)) : hn::Zero(d1);
    const auto sum =
        takes_value ? hn::MulAdd(hn::Set(d1, weight_value), hn::LoadU(d1, value + i), kept) : kept;
    hn::StoreU(sum, d1, acc + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace mla::cpu
HWY_AFTER_NAMESPACE();

#endif  // MLA_CPU_CONVERT_INL_H_
