// Status and Result: how libmla reports errors. Nothing in the library throws, prints or exits.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace mla {

/// Why a call failed. The values are part of the C ABI (`mla_status` in mla.h).
enum class StatusCode : int {
  kOk = 0,
  kInvalidArgument = 1,  ///< an argument contradicts the contract; nothing was launched or written
  kUnsupported = 2,      ///< the request is valid, but no backend here (or not the forced one) serves it
  kOutOfMemory = 3,      ///< an allocation failed, or a size does not fit the address space
  kIo = 4,               ///< a file could not be read or written
  kDevice = 5,           ///< the accelerator's runtime reported an error
  kInternal = 6,         ///< a bug in libmla
  kPeer = 7,             ///< another rank of the group left, or did not arrive in time
};

/// The name of a code, for example "invalid argument".
inline const char* to_string(StatusCode code) noexcept {
  switch (code) {
    case StatusCode::kOk: return "ok";
    case StatusCode::kInvalidArgument: return "invalid argument";
    case StatusCode::kUnsupported: return "unsupported";
    case StatusCode::kOutOfMemory: return "out of memory";
    case StatusCode::kIo: return "input/output error";
    case StatusCode::kDevice: return "device error";
    case StatusCode::kInternal: return "internal error";
    case StatusCode::kPeer: return "peer lost";
  }
  return "unknown status";
}

/// Success, or a code with one sentence of the form "operation: argument: found X, needed Y".
class [[nodiscard]] Status {
 public:
  Status() noexcept = default;
  Status(StatusCode code, std::string message) noexcept
      : code_(code), message_(std::move(message)) {}

  bool ok() const noexcept { return code_ == StatusCode::kOk; }
  StatusCode code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

/// A value, or the Status that says why there is none. `value()` of a failed Result is undefined:
/// test `ok()` first, or use `value_or_throw`.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}                  // NOLINT(google-explicit-constructor)
  Result(Status status) noexcept : status_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    if (status_.ok()) status_ = Status(StatusCode::kInternal, "Result: built from an ok Status");
  }

  bool ok() const noexcept { return value_.has_value(); }
  const Status& status() const noexcept { return status_; }

  T& value() & noexcept { return *value_; }
  const T& value() const& noexcept { return *value_; }
  T&& value() && noexcept { return std::move(*value_); }
  T* operator->() noexcept { return &*value_; }
  const T* operator->() const noexcept { return &*value_; }
  T& operator*() & noexcept { return *value_; }
  const T& operator*() const& noexcept { return *value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

/// What `throw_if_error` and `value_or_throw` throw, for callers that prefer exceptions. The library
/// itself never throws it.
class Error : public std::runtime_error {
 public:
  explicit Error(const Status& status) : std::runtime_error(status.message()), code_(status.code()) {}
  StatusCode code() const noexcept { return code_; }

 private:
  StatusCode code_;
};

inline void throw_if_error(const Status& status) {
  if (!status.ok()) throw Error(status);
}

template <class T>
T value_or_throw(Result<T> result) {
  throw_if_error(result.ok() ? Status() : result.status());
  return std::move(result).value();
}

}  // namespace mla
