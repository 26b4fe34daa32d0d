// Faults that users met: scales, quantised caches, the base of lse, numeric range.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "support/rows.hpp"
#include "support/scene.hpp"
#include "testkit/case.hpp"
#include "testkit/rng.hpp"

namespace mla {
namespace {

using namespace test;

TEST(Faults, B22_LseHasTheDocumentedBase) {
  Scene scene = with_zero_queries(random_scene(shape(1, 1), {1600}));
  for_each_row(scene, [&](const std::string& row) {
    EXPECT_NEAR(decode(scene, row).lse_at(0, 0), std::log(1600.0), 1e-3);
    Scene binary = scene;
    binary.problem.lse_base = LseBase::kTwo;
    EXPECT_NEAR(decode(binary, row).lse_at(0, 0), std::log2(1600.0), 1e-3);
  });
}

TEST(Faults, B30_NothingIsScaledThatTheCallerDidNotScale) {
  // Numbers that bf16 and e4m3 both hold exactly: the format of the cache must not enter the
  // scores.
  Scene scene = random_scene(shape(16), {90});
  testkit::Rng rng(5);
  for (float& value : scene.requests[0].keys) value = static_cast<float>(rng.between(-8, 8)) / 8.0F;
  Scene quantised = scene;
  quantised.problem.kv_format = KvFormat::kE4M3;
  const Exact right = exact(scene);
  EXPECT_EQ(right.out, exact(quantised).out);
  for_each_row(scene,
               [&](const std::string& row) { expect_right(scene, decode(scene, row), right); });
  for_each_row(quantised, [&](const std::string& row) {
    expect_right(scene, decode(quantised, row), right);  // by the tolerance of bf16
  });
}

/// True values stored as value / scale in e4m3 and decoded with `scale` on both sides.
Scene quantise(const Scene& truth, float scale) {
  Scene scene = truth;
  scene.problem.kv_format = KvFormat::kE4M3;
  for (Request& request : scene.requests) {
    for (float& value : request.keys) value /= scale;
  }
  scene.scale *= scale;
  scene.value_scale *= scale;
  return scene;
}

TEST(Faults, B31_ACacheScaleActsOnScoresAndValues) {
  Scene truth = random_scene(shape(16), {64, 5});
  for (Request& request : truth.requests) {
    for (float& value : request.keys) value *= 0.05F;
  }
  const Scene scene = quantise(truth, 0.05F);
  for_each_row(scene, [&](const std::string& row) { expect_right(scene, decode(scene, row)); });
}

TEST(Faults, B32_EveryCacheScaleGivesTheUnquantisedResult) {
  const Scene truth = random_scene(shape(16), {64, 200});
  const Exact unquantised = exact(truth);
  for (const float scale : {4.0F, 2.0F, 0.125F}) {
    const Scene scene = quantise(truth, scale);
    for_each_row(scene, [&](const std::string& row) {
      // A dropped or doubled factor would show as 2, 4 or 16; e4m3 steps are 1/16.
      EXPECT_LT(relative_error(decode(scene, row), unquantised.out), 0.1) << scale;
    });
  }
}

TEST(Faults, B33_AScaleAbsentByValueOrByPointerIsTheSame) {
  for (const KvFormat kv : {KvFormat::kBF16, KvFormat::kE4M3}) {
    const Scene scene = random_scene(shape(16, 64, kv), {100});
    for_each_row(scene, [&](const std::string& row) {
      const float one = 1.0F;
      const float score_scale = scene.scale;
      Laid absent = lay_out(scene);
      absent.tensors.bmm2_scale = DecodeTensors().bmm2_scale;
      Laid pointer = lay_out(scene);
      pointer.tensors.bmm2_scale = Scale(&one);
      pointer.tensors.bmm1_scale = Scale(&score_scale);
      const Output by_value = decode(scene, row);
      EXPECT_TRUE(same_bits(run_laid(absent, row), by_value));
      EXPECT_TRUE(same_bits(run_laid(pointer, row), by_value));
    });
  }
}

TEST(Faults, B35_TheSoftmaxScaleIsNeverGuessed) {
  const Scene scene = random_scene(shape(16), {10});
  for_each_row(scene, [&](const std::string& row) {
    Laid laid = lay_out(scene);
    laid.tensors.bmm1_scale = Scale();
    const Result<DecodePlan> made = plan(laid.problem, forced(row));
    std::vector<double> workspace(made->workspace_bytes() / 8 + 1);
    EXPECT_TRUE(refused(run(*made, laid.tensors, workspace.data(), workspace.size() * 8),
                        StatusCode::kInvalidArgument,
                        "run: bmm1_scale: found nan, needed a finite factor, or a pointer to one"));
  });
}

TEST(Faults, B36_OneKeyDoesNotFeelTheScaleAndMoreDo) {
  for (const KvFormat kv : {KvFormat::kBF16, KvFormat::kE4M3}) {
    const Scene one = random_scene(shape(16, 64, kv), {1});
    Scene one_scaled = one;
    one_scaled.scale *= 1.59F;
    const Scene more = random_scene(shape(16, 64, kv), {2, 17});
    Scene more_scaled = more;
    more_scaled.scale *= 1.59F;
    for_each_row(one, [&](const std::string& row) {
      EXPECT_EQ(decode(one, row).out, decode(one_scaled, row).out);
      const Output plain = decode(more, row);
      const Output scaled = decode(more_scaled, row);
      expect_right(more, plain);
      expect_right(more_scaled, scaled);
      EXPECT_GT(relative_error(scaled, plain), 0.02);
    });
  }
}

TEST(Faults, B37_TheScaleIsUsed) {
  const Scene scene = random_scene(shape(8), {40, 90}, {2});
  Scene doubled = scene;
  doubled.scale *= 2;
  for_each_row(scene, [&](const std::string& row) {
    const Output plain = decode(scene, row);
    const Output twice = decode(doubled, row);
    expect_right(scene, plain);
    expect_right(doubled, twice);
    EXPECT_GT(relative_error(twice, plain), 0.02);
  });
}

TEST(Faults, B39_AnotherSpellingOfATypeIsOneClearRefusal) {
  for (const char* spelling : {"fp8", "fp8_e4m3", "float8_e4m3fn", "auto"}) {
    const Result<testkit::Case> parsed =
        testkit::parse_case(std::string("b=1,h=1,len=1,kv=") + spelling);
    ASSERT_FALSE(parsed.ok()) << spelling;
    EXPECT_NE(parsed.status().message().find("e4m3"), std::string::npos)
        << parsed.status().message();
  }
}

TEST(Faults, B41_QuantisedCachesOfAnyLengthAreRight) {
  for (const KvFormat kv : {KvFormat::kE4M3, KvFormat::kFp8DsMla}) {
    for (const std::int64_t heads : {1, 16}) {
      const Scene scene = random_scene(shape(heads, 64, kv), {1, 31, 32, 33});
      for_each_row(scene, [&](const std::string& row) { expect_right(scene, decode(scene, row)); });
    }
  }
}

TEST(Faults, B42_SeveralTurnsOverAnFP8CacheStayRight) {
  // Prefill 40, decode 30, append 60 with cached prefix, decode 30: every fifth step.
  const DecodeProblem problem = shape(20, 64, KvFormat::kE4M3);
  const Request history = random_request(problem, 160, 1, 77);
  const auto step = [&](std::int64_t len, std::int64_t tokens) {
    Scene scene = random_scene(problem, {0}, {tokens}, static_cast<std::uint64_t>(len));
    scene.requests[0].keys.assign(history.keys.begin(), history.keys.begin() + len * 576);
    Scene unquantised = scene;
    unquantised.problem.kv_format = KvFormat::kBF16;
    const Exact right = exact(scene);
    const Exact bf16 = exact(unquantised);
    for_each_row(scene, [&](const std::string& row) {
      const Output output = decode(scene, row);
      expect_right(scene, output, right);
      EXPECT_LT(relative_error(output, bf16.out), 0.1) << "length " << len;
    });
  };
  step(40, 40);
  for (std::int64_t len = 41; len <= 70; len += 5) step(len, 1);
  step(130, 60);
  for (std::int64_t len = 131; len <= 160; len += 5) step(len, 1);
}

TEST(Faults, B44_LargeF16ProductsDoNotOverflow) {
  // Raw q.c sums reach 1e5; the scale brings the logits back to about 10.
  Scene scene = random_scene(shape(16, 64, KvFormat::kF16, DType::kF16), {50});
  scene.scale = 1e-4F;
  testkit::Rng rng(3);
  std::vector<float> sign(576);
  for (float& value : sign) value = rng.one_in(2) ? 13.0F : -13.0F;
  Request& request = scene.requests[0];
  for (std::size_t i = 0; i < request.query.size(); ++i) request.query[i] = sign[i % 576];
  for (std::size_t i = 0; i < request.keys.size(); ++i) {
    request.keys[i] = sign[i % 576] * (0.5F + static_cast<float>(i / 576) / 50.0F);
  }
  EXPECT_GT(exact(scene).lse[0], 10.0);
  for_each_row(scene, [&](const std::string& row) {
    const Output output = decode(scene, row);
    EXPECT_TRUE(output.finite());
    expect_right(scene, output);
  });
}

TEST(Faults, B45_VeryNegativeScoresAreNotAMask) {
  for (const std::int64_t heads : {1, 16}) {
    Scene scene = random_scene(shape(heads), {1});
    for (float& value : scene.requests[0].query) value = 1;
    for (float& value : scene.requests[0].keys) value = -1;
    scene.scale = 60000.0F / 576.0F;
    for_each_row(scene, [&](const std::string& row) {
      const Output output = decode(scene, row);
      for (std::int64_t head = 0; head < heads; ++head) {
        EXPECT_NEAR(output.lse_at(0, head), -60000.0F, 0.1F);
        for (std::int64_t d = 0; d < 512; ++d) EXPECT_EQ(output.at(0, head, d), -1.0);
      }
    });
    // The first two of three tokens stand before the only key: fully masked.
    const Scene masked = random_scene(shape(heads), {1}, {3});
    for_each_row(masked, [&](const std::string& row) {
      const Output output = decode(masked, row);
      expect_right(masked, output);
      for (std::int64_t token = 0; token < 2; ++token) {
        EXPECT_EQ(output.lse_at(token, 0), -std::numeric_limits<float>::infinity());
        EXPECT_EQ(output.at(token, 0, 7), 0.0);
      }
    });
  }
}

TEST(Faults, B44_ScoresOfTenThousandKeepTheirOrder) {
  // Scores of +-1e4: the largest key wins alone, whatever its place.
  for (const std::int64_t heads : {1, 16}) {
    for (const std::size_t winner : {std::size_t{0}, std::size_t{57}, std::size_t{119}}) {
      Scene scene = random_scene(shape(heads), {120});
      Request& request = scene.requests[0];
      for (std::size_t j = 0; j < 120; ++j) {
        request.keys[j * 576 + 512] = j == winner ? 1.0F : -1.0F;
        for (std::size_t d = 513; d < 576; ++d) request.keys[j * 576 + d] = 0;
      }
      for (std::size_t i = 0; i < request.query.size(); ++i)
        request.query[i] = i % 576 == 512 ? 100.0F : 0.0F;
      scene.scale = 100;
      for_each_row(scene, [&](const std::string& row) {
        const Output output = decode(scene, row);
        for (std::int64_t d = 0; d < 512; ++d) {
          const float value = request.keys[winner * 576 + static_cast<std::size_t>(d)];
          EXPECT_EQ(output.at(0, heads - 1, d), static_cast<double>(stored(DType::kBF16, value)));
        }
        EXPECT_NEAR(output.lse_at(0, 0), 1e4F, 0.1F);
      });
    }
  }
}

TEST(Faults, B138_LseIsReturnedForEveryType) {
  for (const DType q : {DType::kBF16, DType::kF16, DType::kE4M3}) {
    for (const KvFormat kv :
         {KvFormat::kBF16, KvFormat::kF16, KvFormat::kE4M3, KvFormat::kFp8DsMla}) {
      // B139: any query type with an FP8 cache is among them.
      const Scene scene = random_scene(shape(5, 64, kv, q), {70, 3});
      for_each_row(scene, [&](const std::string& row) {
        const Output output = decode(scene, row);
        expect_right(scene, output);
        Laid without = lay_out(scene);
        without.tensors.lse = {};
        EXPECT_EQ(run_laid(without, row).out, output.out);
        EXPECT_EQ(without.lse.as<std::uint32_t>()[0], 0xFFFFFFFFU) << "lse was written uninvited";
      });
    }
  }
}

}  // namespace
}  // namespace mla
