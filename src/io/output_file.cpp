#include "io/output_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <system_error>
#include <utility>

#include "core/diagnostics.hpp"

namespace mla::io {
namespace {

constexpr std::size_t kPendingBytes = std::size_t{1} << 18;
constexpr std::size_t kLargestWrite = std::size_t{1} << 30;  // one write() takes less than 2 GiB
constexpr int kTemporaryTries = 1000;

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? std::string() : path.substr(0, slash + 1);
}

std::string resolve_links(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> real(::realpath(path.c_str(), nullptr), ::free);
  return real ? std::string(real.get()) : path;
}

}  // namespace

Status io_error(const char* operation, const std::string& path, int error_number,
                const std::string& needed) {
  return {StatusCode::kIo,
          text(operation, ": ", path, ": found ", std::generic_category().message(error_number),
               " (errno ", error_number, "), needed ", needed)};
}

Result<OutputFile> OutputFile::create(const char* operation, const std::string& path) {
  OutputFile file;
  file.operation_ = operation;
  file.path_ = path;
  struct stat info {};
  const bool exists = ::stat(path.c_str(), &info) == 0;
  if (exists && S_ISDIR(info.st_mode)) {
    return io_error(operation, path, EISDIR, "the name of a file");
  }
  if (exists && !S_ISREG(info.st_mode)) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
    if (fd < 0) return io_error(operation, path, errno, "a writable file");
    file.fd_ = fd;
    return file;
  }
  // The folder decides whether a name may be replaced; a read-only file is refused all the same.
  if (exists && ::access(path.c_str(), W_OK) != 0) {
    return io_error(operation, path, errno, "a writable file");
  }
  file.final_path_ = exists ? resolve_links(path) : path;
  MLA_RETURN_IF_ERROR(file.open_temporary(exists ? &info : nullptr));
  return file;
}

Status OutputFile::open_temporary(const struct stat* existing) {
  static std::atomic<unsigned> counter{0};
  const std::string folder = folder_of(final_path_);
  int error_number = EEXIST;
  for (int attempt = 0; attempt < kTemporaryTries; ++attempt) {
    std::string name = text(folder, ".mla-", ::getpid(), "-", counter++, ".tmp");
    const int fd = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0) {
      fd_ = fd;
      temporary_path_ = std::move(name);
      if (existing != nullptr && ::fchmod(fd, existing->st_mode & 07777) != 0) {
        return io_error(operation_, path_, errno, "the mode of the file to be replaced");
      }
      return {};
    }
    error_number = errno;
    if (error_number != EEXIST) break;
  }
  return io_error(operation_, path_, error_number, "a folder in which a file can be made");
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : operation_(other.operation_),
      path_(std::move(other.path_)),
      final_path_(std::move(other.final_path_)),
      temporary_path_(std::exchange(other.temporary_path_, {})),
      fd_(std::exchange(other.fd_, -1)),
      written_(other.written_),
      pending_(std::move(other.pending_)) {}

OutputFile::~OutputFile() {
  discard();
}

void OutputFile::discard() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  if (!temporary_path_.empty()) ::unlink(temporary_path_.c_str());
  temporary_path_.clear();
}

Status OutputFile::write_through(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::size_t size = bytes.size() < kLargestWrite ? bytes.size() : kLargestWrite;
    const ssize_t done = ::write(fd_, bytes.data(), size);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) {
      const int error_number = done < 0 ? errno : EIO;
      return io_error(operation_, path_, error_number,
                      text("room for every byte (", written_, " written)"));
    }
    written_ += static_cast<std::uint64_t>(done);
    bytes = bytes.subspan(static_cast<std::size_t>(done));
  }
  return {};
}

Status OutputFile::write(std::span<const std::byte> bytes) {
  if (pending_.size() + bytes.size() > kPendingBytes) {
    MLA_RETURN_IF_ERROR(write_through(pending_));
    pending_.clear();
    if (bytes.size() > kPendingBytes / 2) return write_through(bytes);
  }
  pending_.insert(pending_.end(), bytes.begin(), bytes.end());
  return {};
}

Status OutputFile::commit() {
  MLA_RETURN_IF_ERROR(write_through(pending_));
  pending_.clear();
  const bool direct = temporary_path_.empty();
  // A device or pipe has no stable storage to wait for, and says so.
  if (::fsync(fd_) != 0 && !(direct && (errno == EINVAL || errno == EROFS || errno == ENOTSUP))) {
    return io_error(operation_, path_, errno, "the bytes on stable storage");
  }
  if (::close(std::exchange(fd_, -1)) != 0) {
    return io_error(operation_, path_, errno, "a file that closes without an error");
  }
  if (direct) return {};
  if (::rename(temporary_path_.c_str(), final_path_.c_str()) != 0) {
    return io_error(operation_, path_, errno, "a name that can be given to the finished file");
  }
  temporary_path_.clear();
  return {};
}

}  // namespace mla::io
