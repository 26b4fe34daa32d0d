// The safetensors reader and writer: what is accepted comes back bit for bit, everything else ends
// in one sentence.
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>

#include "io/page_pool.hpp"
#include "io_test_support.hpp"

namespace mla::io::test {
namespace {

using Safetensors = FolderTest;

constexpr char kOneTensor[] = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";

Status parse_status(const Bytes& file) {
  const Result<SafetensorsFile> result = SafetensorsFile::parse(file);
  return result.ok() ? Status() : result.status();
}

TEST_F(Safetensors, WhatIsWrittenIsReadBackBitForBit) {
  const float floats[] = {1.5F, -0.0F, 3e-41F, 7.0F, 8.0F, 9.0F};
  const std::uint16_t halves[] = {0x7FC1, 0xFFFF, 0x0001};
  const std::uint8_t bytes[] = {0x7F, 0xFF, 0x00, 0x10, 0x20};
  const std::int32_t ints[] = {-1, 2147483647};
  ASSERT_TRUE(
      write_safetensors(path("x"),
                        {{"bytes", TensorView::contiguous(bytes, DType::kU8, {5})},
                         {"fp8 \"\n\xC3\xA9", TensorView::contiguous(bytes, DType::kE4M3, {1, 3})},
                         {"half", TensorView::contiguous(halves, DType::kF16, {3, 1})},
                         {"brain", TensorView::contiguous(halves, DType::kBF16, {1, 1, 3})},
                         {"float", TensorView::contiguous(floats, DType::kF32, {2, 3})},
                         {"int", TensorView::contiguous(ints, DType::kI32, {2})},
                         {"scalar", TensorView::contiguous(floats, DType::kF32, {})},
                         {"none", TensorView::contiguous(nullptr, DType::kF32, {0, 4})}},
                        {{"key", "value"}, {"\xE2\x82\xAC", "\t\\"}})
          .ok());
  const Result<SafetensorsFile> file = SafetensorsFile::open(path("x"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file->names().size(), 8U);
  EXPECT_EQ(file->metadata(), (Metadata{{"key", "value"}, {"\xE2\x82\xAC", "\t\\"}}));
  const auto expect = [&](const char* name, const void* data, DType dtype, std::size_t size,
                          std::vector<std::int64_t> shape) {
    const Result<TensorView> view = file->view(name);
    ASSERT_TRUE(view.ok()) << view.status().message();
    EXPECT_EQ(view->dtype, dtype);
    EXPECT_EQ(std::vector<std::int64_t>(view->shape, view->shape + view->rank), shape);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view->data) % dtype_bytes(dtype), 0U);
    EXPECT_EQ(file->find(name)->bytes.size(), size);
    if (size > 0) {
      EXPECT_EQ(std::memcmp(view->data, data, size), 0) << name;
    }
  };
  expect("bytes", bytes, DType::kU8, 5, {5});
  expect("fp8 \"\n\xC3\xA9", bytes, DType::kE4M3, 3, {1, 3});
  expect("half", halves, DType::kF16, 6, {3, 1});
  expect("brain", halves, DType::kBF16, 6, {1, 1, 3});
  expect("float", floats, DType::kF32, 24, {2, 3});
  expect("int", ints, DType::kI32, 8, {2});
  expect("scalar", floats, DType::kF32, 4, {});
  expect("none", nullptr, DType::kF32, 0, {0, 4});
  EXPECT_EQ(file->view("float")->stride[0], 3);
  EXPECT_EQ(file->view("float")->stride[1], 1);
}

TEST_F(Safetensors, EqualArgumentsGiveEqualFilesAndDataStartsAligned) {
  const std::uint8_t bytes[] = {1, 2, 3};
  const std::vector<NamedTensor> tensors = {{"t", TensorView::contiguous(bytes, DType::kU8, {3})}};
  ASSERT_TRUE(write_safetensors(path("x"), tensors, {{"k", "v"}}).ok());
  ASSERT_TRUE(write_safetensors(path("y"), tensors, {{"k", "v"}}).ok());
  EXPECT_EQ(read_bytes(path("x")), read_bytes(path("y")));
  EXPECT_EQ((read_bytes(path("x")).size() - 3) % 64, 0U);
}

TEST_F(Safetensors, StridedViewsAreWrittenContiguous) {
  std::int32_t numbers[2 * 3 * 4];
  for (int i = 0; i < 24; ++i) numbers[i] = i;
  TensorView view = TensorView::contiguous(numbers, DType::kI32, {2, 2, 2});
  view.stride[0] = 12;
  view.stride[1] = 8;  // every other row of 3
  view.stride[2] = 3;  // columns 0 and 3
  TensorView reversed = TensorView::contiguous(numbers + 3, DType::kI32, {4});
  reversed.stride[0] = -1;
  ASSERT_TRUE(write_safetensors(path("x"), {{"a", view}, {"b", reversed}}).ok());
  const Result<SafetensorsFile> file = SafetensorsFile::open(path("x"));
  ASSERT_TRUE(file.ok());
  const std::int32_t expected[] = {0, 3, 8, 11, 12, 15, 20, 23, 3, 2, 1, 0};
  EXPECT_EQ(std::memcmp(file->view("a")->data, expected, 32), 0);
  EXPECT_EQ(std::memcmp(file->view("b")->data, expected + 8, 16), 0);
}

TEST_F(Safetensors, MisalignedTensorsAreCopied) {
  const Bytes file = raw_file(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                              R"("b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]},)"
                              R"("c":{"dtype":"BF16","shape":[2],"data_offsets":[9,13]}})",
                              13);
  for (std::size_t shift = 0; shift < 4; ++shift) {
    Bytes moved(shift);
    moved.insert(moved.end(), file.begin(), file.end());
    const Result<SafetensorsFile> parsed = SafetensorsFile::parse(std::span(moved).subspan(shift));
    ASSERT_TRUE(parsed.ok()) << parsed.status().message();
    const unsigned char expected[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    const TensorView b = *parsed->view("b");
    const TensorView c = *parsed->view("c");
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b.data) % 4, 0U);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(c.data) % 2, 0U);
    EXPECT_EQ(std::memcmp(b.data, expected, 8), 0);
    EXPECT_EQ(std::memcmp(c.data, expected + 8, 4), 0);
  }
}

TEST_F(Safetensors, CopiesKeepTheBytesAlive) {
  const float value = 2.5F;
  ASSERT_TRUE(
      write_safetensors(path("x"), {{"a", TensorView::contiguous(&value, DType::kF32, {1})}}).ok());
  TensorView view;
  {
    Result<SafetensorsFile> first = SafetensorsFile::open(path("x"));
    ASSERT_TRUE(first.ok());
    const SafetensorsFile second = *first;
    first = Status(StatusCode::kInternal, "gone");
    view = *second.view("a");
    EXPECT_EQ(*static_cast<const float*>(view.data), 2.5F);
  }
}

TEST_F(Safetensors, ForeignTypesAreListedButRefusedAsViews) {
  const Bytes file = raw_file(R"({"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},)"
                              R"("b":{"dtype":"I64","shape":[1],"data_offsets":[8,16]},)"
                              R"("c":{"dtype":"BOOL","shape":[1],"data_offsets":[16,17]},)"
                              R"("d":{"dtype":"F8_E5M2","shape":[1],"data_offsets":[17,18]},)"
                              R"("e":{"dtype":"F4","shape":[2],"data_offsets":[18,19]},)"
                              R"("f":{"dtype":"U8","shape":[1,1,1,1,1],"data_offsets":[19,20]}})",
                              20);
  const Result<SafetensorsFile> parsed = SafetensorsFile::parse(file);
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_EQ(parsed->names(), (std::vector<std::string>{"a", "b", "c", "d", "e", "f"}));
  EXPECT_EQ(parsed->find("b")->to_string(), "I64 [1]");
  EXPECT_TRUE(mentions(parsed->view("a").status(), StatusCode::kInvalidArgument,
                       {"tensor 'a'", "found F64 [1]", "needed BF16, F16, F32"}));
  for (const char* name : {"b", "c", "d", "e"}) EXPECT_FALSE(parsed->view(name).ok()) << name;
  EXPECT_TRUE(mentions(parsed->view("f").status(), StatusCode::kInvalidArgument,
                       {"tensor 'f'", "found U8 [1,1,1,1,1]", "needed at most 4 axes"}));
  EXPECT_TRUE(mentions(parsed->view("g").status(), StatusCode::kInvalidArgument,
                       {"tensor 'g'", "found no such tensor"}));
}

TEST_F(Safetensors, UnusualButValidHeadersAreAccepted) {
  EXPECT_TRUE(parse_status(raw_file("{}", 0)).ok());
  EXPECT_TRUE(parse_status(raw_file("{}     ", 0)).ok());
  EXPECT_TRUE(parse_status(raw_file(R"({"__metadata__":{}})", 0)).ok());
  // Tensors may stand in any order in the header, and empty ones anywhere.
  EXPECT_TRUE(parse_status(raw_file(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},)"
                                    R"("e":{"data_offsets":[1,1],"shape":[0,7],"dtype":"F32"},)"
                                    R"("b":{"dtype":"U8","shape":[],"data_offsets":[0,1]}})",
                                    3))
                  .ok());
}

struct Refusal {
  std::string json;
  std::size_t data_bytes;
  std::vector<std::string> parts;
};

/// The header of one tensor whose three fields are as given.
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"a":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

TEST_F(Safetensors, EveryViolationIsRefusedWithItsNameTheValueAndTheNeed) {
  const std::string f32 = R"("F32")";
  const std::string nested = std::string(200000, '[');
  const std::string good = R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  const std::vector<Refusal> refusals = {
      {"", 0, {"header", "starts with '{'"}},
      {"[]", 0, {"header", "starts with '{'"}},
      {" {}", 0, {"header", "starts with '{'"}},
      {"\xEF\xBB\xBF{}", 0, {"header", "starts with '{'"}},
      {std::string("{}\0", 3), 0, {"header", "no zero byte"}},
      {"{", 0, {"header", "invalid JSON"}},
      {"{} x", 0, {"header", "invalid JSON"}},
      {"{}{}", 0, {"header", "invalid JSON"}},
      {R"({"a\xFF":1})", 0, {"header", "invalid JSON"}},
      {"{\"a\xC3\":1}", 0, {"header", "invalid JSON"}},
      {R"({"a":1})", 0, {"tensor 'a'", "found 1", "dtype, shape and data_offsets"}},
      {R"({"a":null})", 0, {"tensor 'a'", "found null"}},
      {R"({"a":)" + nested, 0, {"tensor 'a'", "found an array"}},
      {R"({"a":{"dtype":)" + nested, 0, {"tensor 'a': dtype", "found an array"}},
      {R"({"a":{"shape":[)" + nested, 0, {"tensor 'a': shape", "found an array"}},
      {R"({"a":)" + good + R"(,"a":)" + good + "}", 1, {"header", "found 'a' twice"}},
      {R"({"a":)" + good + R"(,"\u0061":)" + good + "}", 1, {"header", "found 'a' twice"}},
      {R"({"__metadata__":{"k":"1","k":"2"}})", 0, {"metadata key 'k' twice"}},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, {"'__metadata__' twice"}},
      {R"({"__metadata__":{"k":1}})", 0, {"metadata 'k'", "found 1", "needed a string"}},
      {R"({"__metadata__":{"k":{}}})", 0, {"metadata 'k'", "found an object", "needed a string"}},
      {R"({"__metadata__":["k"]})", 0, {"__metadata__", "found an array", "an object of strings"}},
      {R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1, {"tensor 'a'", "found no dtype"}},
      {R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1, {"tensor 'a'", "found no shape"}},
      {R"({"a":{"dtype":"U8","shape":[1]}})", 1, {"tensor 'a'", "found no data_offsets"}},
      {R"({"a":{"dtype":"U8","dtype":"U8"}})", 1, {"tensor 'a'", "found dtype twice"}},
      {R"({"a":{"offsets":1}})", 1, {"tensor 'a'", "the field 'offsets'"}},
      {one(R"("F99")", "[1]", "[0,4]"), 4, {"tensor 'a': dtype", "found 'F99'", "safetensors"}},
      {one(R"("f32")", "[1]", "[0,4]"), 4, {"tensor 'a': dtype", "found 'f32'"}},
      {one("7", "[1]", "[0,4]"), 4, {"tensor 'a': dtype", "found 7"}},
      {one(f32, "[-1]", "[0,4]"), 4, {"tensor 'a': shape", "found -1", "integers from 0"}},
      {one(f32, "[1.5]", "[0,4]"), 4, {"tensor 'a': shape", "found 1.5"}},
      {one(f32, "[1e2]", "[0,4]"), 4, {"tensor 'a': shape", "found 1e2"}},
      {one(f32, "[1e999]", "[0,4]"), 4, {"header", "invalid JSON", "1e999"}},
      {one(f32, "[18446744073709551616]", "[0,4]"),
       4,
       {"tensor 'a': shape", "18446744073709551616"}},
      {one(f32, "[9223372036854775808]", "[0,4]"), 4, {"tensor 'a': shape", "9223372036854775808"}},
      {one(f32, "[true]", "[0,4]"), 4, {"tensor 'a': shape", "found true"}},
      {one(f32, R"(["1"])", "[0,4]"), 4, {"tensor 'a': shape", "the string '1'"}},
      {one(f32, "4", "[0,4]"), 4, {"tensor 'a': shape", "found 4", "an array of integers"}},
      {one(f32, "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, {"tensor 'a': shape", "more than 8"}},
      {one(f32, "[4294967296,4294967296]", "[0,0]"),
       0,
       {"tensor 'a': shape", "F32 [4294967296,4294967296]", "fits 63 bits"}},
      {one(f32, "[2305843009213693952]", "[0,0]"), 0, {"tensor 'a': shape", "fits 63 bits"}},
      {one(f32, "[4611686018427387904,4611686018427387904,0]", "[0,0]"), 0, {"fits 63 bits"}},
      {one(R"("F4")", "[3]", "[0,1]"), 1, {"tensor 'a': shape", "whole bytes"}},
      {one(f32, "[1]", "[4,0]"), 4, {"tensor 'a': data_offsets", "found [4,0]", "4 bytes"}},
      {one(f32, "[1]", "[0,8]"), 8, {"tensor 'a': data_offsets", "found [0,8]", "4 bytes for F32"}},
      {one(f32, "[1]", "[0]"), 4, {"tensor 'a': data_offsets", "found 1", "2 integers"}},
      {one(f32, "[1]", "[]"), 4, {"tensor 'a': data_offsets", "found 0", "2 integers"}},
      {one(f32, "[1]", "[0,4,4]"), 4, {"tensor 'a': data_offsets", "more than 2"}},
      {one(f32, "[1]", "[0,-4]"), 4, {"tensor 'a': data_offsets", "found -4"}},
      {one(f32, "[1]", "[0,4]"), 3, {"tensor 'a': data_offsets", "found [0,4]", "the 3 bytes"}},
      {one(f32, "[1]", "[0,4]"), 5, {"found 5 bytes of data", "needed 4"}},
      {one(f32, "[1]", "[18446744073709551612,18446744073709551615]"), 4, {"data_offsets"}},
      {one(f32, "[1]", "[18446744073709551611,18446744073709551615]"), 4, {"within the 4 bytes"}},
      {one(f32, "[1]", "[1,5]"), 5, {"tensor 'a': data_offsets", "begin = 0", "without holes"}},
      {R"({"a":)" + good + R"(,"b":)" + good + "}", 1, {"data_offsets", "without overlap"}},
      {R"({"a":)" + good + R"(,"e":{"dtype":"U8","shape":[0],"data_offsets":[9,9]}})",
       1,
       {"tensor 'e'", "within the 1 bytes"}},
  };
  for (const Refusal& refusal : refusals) {
    EXPECT_TRUE(mentions(parse_status(raw_file(refusal.json, refusal.data_bytes)),
                         StatusCode::kInvalidArgument, refusal.parts))
        << refusal.json.substr(0, 200);
  }
}

TEST_F(Safetensors, MessagesShortenAndCleanHostileNames) {
  const std::string name = "\\u001b[31m" + std::string(100000, 'x');
  const Status status = parse_status(raw_file(R"({")" + name + R"(":1})", 0));
  ASSERT_FALSE(status.ok());
  EXPECT_LT(status.message().size(), 300U);
  EXPECT_EQ(status.message().find('\x1B'), std::string::npos);
}

TEST_F(Safetensors, LyingHeaderLengthsAreRefused) {
  const Bytes good = raw_file(kOneTensor, 8);
  ASSERT_TRUE(parse_status(good).ok());
  const auto with_length = [&](std::uint64_t length) {
    Bytes file = good;
    for (unsigned i = 0; i < 8; ++i) file[i] = static_cast<std::byte>((length >> (8 * i)) & 0xFFU);
    return parse_status(file);
  };
  EXPECT_TRUE(mentions(with_length(UINT64_MAX), StatusCode::kInvalidArgument,
                       {"header length", "18446744073709551615", "at most 100000000"}));
  EXPECT_TRUE(mentions(with_length(good.size() - 7), StatusCode::kInvalidArgument,
                       {"header length", "the rest of the file"}));
  for (std::uint64_t length = 0; length <= good.size(); ++length) {
    EXPECT_EQ(with_length(length).ok(), length == sizeof(kOneTensor) - 1) << length;
  }
}

TEST_F(Safetensors, EveryTruncationAndEveryExtensionIsRefused) {
  const Bytes good = raw_file(kOneTensor, 8);
  for (std::size_t size = 0; size < good.size(); ++size) {
    const Bytes cut(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_FALSE(parse_status(cut).ok()) << size;
    write_bytes(path("cut"), cut);
    EXPECT_EQ(SafetensorsFile::open(path("cut")).status().code(), StatusCode::kInvalidArgument);
  }
  Bytes longer = good;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(parse_status(longer).ok());
}

TEST_F(Safetensors, EveryBitFlipOfTheHeaderEndsInAnAnswer) {
  const Bytes good = raw_file(kOneTensor, 8);
  std::size_t refused = 0;
  for (std::size_t bit = 0; bit < 8 * (good.size() - 8); ++bit) {
    Bytes file = good;
    file[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    const Result<SafetensorsFile> result = SafetensorsFile::parse(file);
    if (!result.ok()) {
      ++refused;
      EXPECT_NE(result.status().message().find(": found "), std::string::npos);
      continue;
    }
    for (const SafetensorsEntry& entry : result->entries()) EXPECT_EQ(entry.bytes.size(), 8U);
  }
  EXPECT_GT(refused, 300U);
}

TEST_F(Safetensors, UnreadableFilesAreReportedWithTheSystemsReason) {
  EXPECT_TRUE(mentions(SafetensorsFile::open(path("none")).status(), StatusCode::kIo,
                       {path("none"), "No such file", "needed a readable file"}));
  EXPECT_TRUE(mentions(SafetensorsFile::open(folder_).status(), StatusCode::kIo,
                       {folder_, "found a folder", "needed a regular file"}));
  EXPECT_TRUE(mentions(SafetensorsFile::open("/dev/zero").status(), StatusCode::kIo,
                       {"/dev/zero", "device"}));
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  EXPECT_TRUE(mentions(SafetensorsFile::open(path("fifo")).status(), StatusCode::kIo, {"a pipe"}));
}

class Writer : public FolderTest {
 protected:
  Status write(const std::string& target, std::size_t size = 8) {
    bytes_.resize(size);
    return write_safetensors(target,
                             {{"a", TensorView::contiguous(bytes_.data(), DType::kU8,
                                                           {static_cast<std::int64_t>(size)})}});
  }
  Bytes bytes_;
};

TEST_F(Writer, AFullDiskIsAnErrorAndLeavesNothing) {
  for (std::size_t size : {std::size_t{8}, std::size_t{1} << 20}) {
    EXPECT_TRUE(mentions(write("/dev/full", size), StatusCode::kIo,
                         {"write_safetensors: /dev/full", "No space left on device", "errno 28"}));
  }
  struct stat info {};
  ASSERT_EQ(::stat("/dev/full", &info), 0);
  EXPECT_TRUE(S_ISCHR(info.st_mode));
}

TEST_F(Writer, DevicesAreWrittenDirectly) {
  EXPECT_TRUE(write("/dev/null").ok());
  struct stat info {};
  ASSERT_EQ(::stat("/dev/null", &info), 0);
  EXPECT_TRUE(S_ISCHR(info.st_mode));
}

TEST_F(Writer, AMissingFolderOrAFolderInPlaceOfAFileIsAnError) {
  EXPECT_TRUE(mentions(write(path("no/x")), StatusCode::kIo, {path("no/x"), "No such file"}));
  EXPECT_TRUE(mentions(write(folder_), StatusCode::kIo, {folder_, "Is a directory"}));
  ASSERT_TRUE(write(path("file")).ok());
  EXPECT_TRUE(mentions(write(path("file/x")), StatusCode::kIo, {"Not a directory"}));
  EXPECT_FALSE(write("/proc/mla_io_test").ok());
  EXPECT_EQ(num_files(), 1U);
}

TEST_F(Writer, AnErrorLeavesTheOldFileAndNoTemporary) {
  ASSERT_TRUE(write(path("x")).ok());
  const Bytes before = read_bytes(path("x"));
  // A view without memory is refused before anything is opened.
  EXPECT_TRUE(mentions(
      write_safetensors(path("x"), {{"a", TensorView::contiguous(nullptr, DType::kF32, {3})}}),
      StatusCode::kInvalidArgument, {"tensor 'a'", "a null pointer", "12 bytes"}));
  EXPECT_EQ(read_bytes(path("x")), before);
  EXPECT_EQ(num_files(), 1U);
}

TEST_F(Writer, AWriteThatFailsHalfWayLeavesTheOldFileAndNoTemporary) {
  ASSERT_TRUE(write(path("x")).ok());
  const Bytes before = read_bytes(path("x"));
  rlimit old_limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  rlimit limit = old_limit;
  limit.rlim_cur = 1 << 19;
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const Status status = write(path("x"), std::size_t{1} << 20);
  const Status fresh = write(path("y"), std::size_t{1} << 20);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_TRUE(mentions(status, StatusCode::kIo, {path("x"), "File too large", "524288 written"}));
  EXPECT_EQ(fresh.code(), StatusCode::kIo);
  EXPECT_EQ(read_bytes(path("x")), before);
  EXPECT_EQ(num_files(), 1U);
}

TEST_F(Writer, ReplacesTheTargetOfALinkAndKeepsItsMode) {
  ASSERT_TRUE(write(path("x")).ok());
  ASSERT_EQ(::chmod(path("x").c_str(), 0640), 0);
  ASSERT_EQ(::symlink("x", path("link").c_str()), 0);
  ASSERT_TRUE(write(path("link"), 100).ok());
  EXPECT_TRUE(std::filesystem::is_symlink(path("link")));
  EXPECT_EQ(SafetensorsFile::open(path("x"))->find("a")->bytes.size(), 100U);
  struct stat info {};
  ASSERT_EQ(::stat(path("x").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777U, 0640U);
  EXPECT_EQ(num_files(), 2U);
}

TEST_F(Writer, NamesAndShapesOutsideTheFormatAreRefused) {
  const float value = 1.0F;
  const TensorView view = TensorView::contiguous(&value, DType::kF32, {1});
  EXPECT_TRUE(mentions(write_safetensors(path("x"), {{"a", view}, {"a", view}}),
                       StatusCode::kInvalidArgument, {"tensor 'a'", "a name in use"}));
  EXPECT_TRUE(mentions(write_safetensors(path("x"), {{"__metadata__", view}}),
                       StatusCode::kInvalidArgument, {"'__metadata__'"}));
  EXPECT_TRUE(mentions(write_safetensors(path("x"), {{"a\xFF", view}}),
                       StatusCode::kInvalidArgument, {"tensor 'a", "needed UTF-8"}));
  EXPECT_TRUE(mentions(write_safetensors(path("x"), {{"a", view}}, {{"k", "\xC3"}}),
                       StatusCode::kInvalidArgument, {"metadata 'k'", "needed UTF-8"}));
  EXPECT_TRUE(mentions(write_safetensors(path("x"), {{"a", TensorView{}}}),
                       StatusCode::kInvalidArgument, {"tensor 'a'", "found no type"}));
  EXPECT_TRUE(mentions(
      write_safetensors(path("x"), {{"a", TensorView::contiguous(&value, DType::kF32, {-1})}}),
      StatusCode::kInvalidArgument, {"tensor 'a'", "found [-1]"}));
  EXPECT_EQ(num_files(), 0U);
}

TEST(PagePool, EveryByteIsFFUntilWritten) {
  for (std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{1} << 20,
                           (std::size_t{1} << 20) + 1, (std::size_t{5} << 20) + 4097}) {
    const Result<PagePool> pool = PagePool::create(size);
    ASSERT_TRUE(pool.ok()) << pool.status().message();
    ASSERT_NE(pool->data(), nullptr);
    EXPECT_EQ(pool->size(), size);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < size; ++i) wrong += pool->data()[i] != std::byte{0xFF};
    EXPECT_EQ(wrong, 0U) << size;
  }
}

TEST(PagePool, AWriteStaysWhereItWasMadeAndAHugePoolIsCheap) {
  const std::size_t size = std::size_t{1} << 38;  // 256 GiB
  const Result<PagePool> pool = PagePool::create(size);
  ASSERT_TRUE(pool.ok()) << pool.status().message();
  const std::size_t at = (std::size_t{200} << 30) + 12345;
  std::memset(pool->data() + at, 0x11, 5);
  const std::size_t filler = std::size_t{64} << 20;
  for (std::size_t offset : {at - 1, at + 5, at - filler, at + filler, std::size_t{0}, size - 1}) {
    EXPECT_EQ(pool->data()[offset], std::byte{0xFF}) << offset;
  }
  EXPECT_EQ(pool->data()[at + 4], std::byte{0x11});
}

}  // namespace
}  // namespace mla::io::test
