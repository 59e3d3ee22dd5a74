// Copies and fills.
#pragma once

#include "memory.h"

namespace fakecuda {

inline void move(char* target, const char* source, size_t nbytes, Kind kind) {
  constexpr size_t kPart = 256 << 10;
  if (settings.delay_us[kind] <= 0) return void(memmove(target, source, nbytes));
  for (size_t at = 0; at < nbytes; at += kPart) {
    memmove(target + at, source + at, std::min(kPart, nbytes - at));
    if (at + kPart < nbytes && !(settings.next_random() & 15)) settings.delay(kind);
  }
}

struct Rows {
  size_t width, height, target_pitch, source_pitch;
  size_t target_extent() const { return height ? (height - 1) * target_pitch + width : 0; }
  size_t source_extent() const { return height ? (height - 1) * source_pitch + width : 0; }
};

inline int copy(void* target, const void* source, Rows rows, const StreamPtr& stream, bool is_async) {
  if (!rows.width || !rows.height) return 0;
  const bool to_device = device_of(target) >= 0, from_device = device_of(source) >= 0;
  const size_t written = rows.target_extent(), read = rows.source_extent();
  Counter to_pinned = to_device ? nullptr : find_registered(target, written);
  Counter from_pinned = from_device ? nullptr : find_registered(source, read);
  const Kind kind = to_device ? (from_device ? ON_DEVICE : FROM_HOST) : TO_HOST;
  for (auto [address, nbytes, is_device] : {std::tuple<const void*, size_t, bool>{target, written, to_device}, {source, read, from_device}})
    if (is_device && !is_allocated(address, nbytes)) {
      settings.misuse("a copy of memory that is not allocated");
      return cudaErrorInvalidValue;
    }
  // Pageable memory: the source is read before the call returns, and the target is written before it returns.
  const bool waits = !is_async || (!to_device && !to_pinned) || (!to_device && !from_device);
  if (waits && capture_of(stream)) {
    invalidate(capture_of(stream), cudaErrorStreamCaptureUnsupported);
    return cudaErrorStreamCaptureUnsupported;
  }
  if (!is_async)
    if (int error = unsafe_call()) return error;
  std::shared_ptr<std::string> staged;
  if (!from_device && !from_pinned && !waits) staged = std::make_shared<std::string>(static_cast<const char*>(source), read);
  char* to = to_device ? alias_of(target) : static_cast<char*>(target);
  const char* from = staged ? staged->data() : from_device ? alias_of(source) : static_cast<const char*>(source);
  auto run = [=, target_use = counted(to_pinned), source_use = counted(from_pinned)] {
    if ((to_device && !is_allocated(target, written)) || (from_device && !is_allocated(source, read)))
      return settings.fail(cudaErrorIllegalAddress, "a copy of memory that has been freed");
    if (rows.height == 1) return move(to, from, rows.width, kind);
    for (size_t row = 0; row < rows.height; row++)
      memmove(to + row * rows.target_pitch, from + row * rows.source_pitch, rows.width);
    (void)staged;
  };
  if (int error = enqueue(stream, {kind, std::move(run)}, rows.width * rows.height)) return error;
  if (!waits) return 0;
  stream->wait_idle();
  return settings.sticky;
}

inline int fill(void* target, int value, size_t width, size_t height, size_t pitch, int itemsize, const StreamPtr& stream) {
  if (!width || !height) return 0;
  if (!is_allocated(target, (height - 1) * pitch + width * itemsize)) return cudaErrorInvalidValue;
  char* to = alias_of(target);
  auto run = [=] {
    for (size_t row = 0; row < height; row++)
      for (size_t at = 0; at < (itemsize == 1 ? 1 : width); at++)
        if (itemsize == 1)
          memset(to + row * pitch, value, width);
        else
          memcpy(to + row * pitch + at * itemsize, &value, itemsize);
  };
  return enqueue(stream, {MEMSET, run}, width * height * itemsize);
}

} // namespace fakecuda
