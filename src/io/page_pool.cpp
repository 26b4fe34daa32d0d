#include "io/page_pool.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <vector>

#include "core/diagnostics.hpp"

namespace mla::io {
namespace {

constexpr std::size_t kAlignment = 64;
/// Below this size plain memory is cheaper, and memory checkers see its ends.
constexpr std::size_t kPlainBytes = std::size_t{1} << 20;
constexpr std::size_t kSmallestFiller = std::size_t{1} << 20;
/// Linux lets a process have about 65 thousand mappings.
constexpr std::size_t kMostMappings = 8192;

Status no_memory(std::size_t bytes, const char* step, int error_number) {
  return {StatusCode::kOutOfMemory,
          text("page pool: ", step, ": found ", std::generic_category().message(error_number),
               " (errno ", error_number, "), needed ", bytes, " bytes of address space")};
}

struct FileDescriptor {
  int fd;
  ~FileDescriptor() {
    if (fd >= 0) ::close(fd);
  }
};

/// A nameless file of `bytes` bytes of 0xFF.
int make_filler(std::size_t bytes) {
  const int fd = ::memfd_create("mla_unowned_pages", MFD_CLOEXEC);
  if (fd < 0) return -1;
  const std::vector<std::byte> block(kSmallestFiller, std::byte{0xFF});
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t count = ::write(fd, block.data(), block.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      const int error_number = count < 0 ? errno : EIO;
      ::close(fd);
      errno = error_number;
      return -1;
    }
    done += static_cast<std::size_t>(count);
  }
  return fd;
}

}  // namespace

Result<PagePool> PagePool::create(std::size_t bytes) {
  PagePool pool;
  pool.size_ = bytes;
  if (bytes <= kPlainBytes) {
    const std::size_t rounded = (bytes / kAlignment + 1) * kAlignment;
    pool.memory_ = std::shared_ptr<void>(std::aligned_alloc(kAlignment, rounded), std::free);
    if (pool.memory_ == nullptr) return no_memory(bytes, "allocation", ENOMEM);
    std::memset(pool.memory_.get(), 0xFF, rounded);
    return pool;
  }

  std::size_t filler_bytes = kSmallestFiller;
  while (bytes / filler_bytes >= kMostMappings) filler_bytes *= 2;
  const FileDescriptor filler{make_filler(filler_bytes)};
  if (filler.fd < 0) return no_memory(bytes, "filler", errno);

  void* base =
      ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return no_memory(bytes, "address range", errno);
  pool.memory_ = std::shared_ptr<void>(base, [bytes](void* p) { ::munmap(p, bytes); });
  for (std::size_t offset = 0; offset < bytes; offset += filler_bytes) {
    const std::size_t length = bytes - offset < filler_bytes ? bytes - offset : filler_bytes;
    void* part = ::mmap(pool.data() + offset, length, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, filler.fd, 0);
    if (part == MAP_FAILED) return no_memory(bytes, "mapping", errno);
  }
  return pool;
}

}  // namespace mla::io
