#include "io/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <limits>

#include "core/diagnostics.hpp"
#include "io/output_file.hpp"

namespace mla::io {

Result<MappedFile> MappedFile::open(const char* operation, const std::string& path) {
  // Without O_NONBLOCK, opening a FIFO would wait for a writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return io_error(operation, path, errno, "a readable file");
  struct Closer {
    int fd;
    ~Closer() { ::close(fd); }
  } closer{fd};

  struct stat info {};
  if (::fstat(fd, &info) != 0) return io_error(operation, path, errno, "a readable file");
  if (!S_ISREG(info.st_mode)) {
    const char* kind = S_ISDIR(info.st_mode) ? "a folder" : "a pipe, socket or device";
    return Status(StatusCode::kIo,
                  text(operation, ": ", path, ": found ", kind, ", needed a regular file"));
  }
  MappedFile file;
  if (info.st_size == 0) return file;
  if (static_cast<std::uint64_t>(info.st_size) > std::numeric_limits<std::size_t>::max()) {
    return io_error(operation, path, EFBIG, "a file that fits the address space");
  }
  const std::size_t size = static_cast<std::size_t>(info.st_size);
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  if (address == MAP_FAILED) return io_error(operation, path, errno, "a file that can be mapped");
  file.mapping_ = std::shared_ptr<const void>(
      address, [size](const void* p) { ::munmap(const_cast<void*>(p), size); });
  file.bytes_ = {static_cast<const std::byte*>(address), size};
  return file;
}

}  // namespace mla::io
