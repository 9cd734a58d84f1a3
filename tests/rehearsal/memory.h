// Memory of the pretend devices, in that of the host: who holds how much of which device, and who has
// used it last.  What `empty` gives is filled with 0xFF, so that nobody takes it for zeros.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <bit>
#include "clocks.h"

#ifdef AS_CUDA
#define REHEARSAL_KEY CUDA
#else
#define REHEARSAL_KEY PrivateUse1
#endif

namespace rehearsal {

constexpr auto KIND = c10::DeviceType::REHEARSAL_KEY;
constexpr int PINNED = -1;  // in place of a device: memory of the host that copies read at once

inline int num_devices = 1;
inline int64_t bytes_of_device = int64_t(8) << 30;
inline thread_local int device_now = 0;
inline thread_local int64_t stream_now[MOST_DEVICES] = {0};  // its number, by device

inline Stream current_stream(int device) { return stream_on(device, stream_now[device]); }
inline Stream current_stream() { return current_stream(device_now); }

struct Block {
  size_t size;
  size_t taken;  // more than `size` where what gives it rounds up
  int device;
  Stream stream;  // that was current when it was made: it may be made anew there without waiting
  Uses uses;
  std::set<Stream> recorded;  // that `record_stream` has told of
};

inline auto& blocks = lasting<std::map<char*, Block>>();
inline int64_t live[MOST_DEVICES] = {0}, peak[MOST_DEVICES] = {0}, pinned_bytes = 0;

inline Block* block_at(const void* place) {
  auto next = blocks.upper_bound((char*)place);
  if (next == blocks.begin()) return nullptr;
  auto& [start, block] = *std::prev(next);
  return (char*)place < start + block.size ? &block : nullptr;
}

inline void note_made(void* place, size_t size, int device, size_t taken = 0) {
  if (!place) return;
  std::lock_guard held(guard);
  Stream stream = device == PINNED ? HOST : current_stream(device);
  taken = std::max(taken, size);
  blocks[(char*)place] = Block{size, taken, device, stream, {}, {}};
  if (device == PINNED) {
    pinned_bytes += taken;
    return;
  }
  live[device] += size;
  peak[device] = std::max(peak[device], live[device]);
}

inline void note_freed(void* place) {
  std::lock_guard held(guard);
  auto at = blocks.find((char*)place);
  if (at == blocks.end()) return;
  auto& block = at->second;
  auto check = [&](const Use& use) {
    bool is_safe = is_behind(block.stream, use);
    for (auto stream : block.recorded) is_safe |= is_behind(stream, use);
    if (!is_safe)
      tell_race("memory of " + named(block.stream) + " is freed while " + use.op + " on " +
                named(use.stream) + " may still use it");
  };
  if (block.device != PINNED) {  // pinned memory is kept until what was queued is over
    check(block.uses.write);
    for (auto& [stream, read] : block.uses.reads) check(read);
    live[block.device] -= block.size;
  } else {
    pinned_bytes -= block.taken;
  }
  blocks.erase(at);
}

inline void note_use_of(const void* place, const Use& now, bool writes) {
  std::lock_guard held(guard);
  if (auto* block = block_at(place)) note_use(block->uses, now, writes);
}

struct Allocator : c10::Allocator {
  explicit Allocator(bool pinned) : is_pinned(pinned) {}
  const bool is_pinned;

  c10::DataPtr allocate(size_t size) override {
    auto device = is_pinned ? c10::Device(c10::DeviceType::CPU) : c10::Device(KIND, device_now);
    void* place = nullptr;
    if (size) {
      check_room(size);
      if (posix_memalign(&place, 64, size)) throw std::bad_alloc();
      memset(place, 0xFF, size);
      note_made(place, size, is_pinned ? PINNED : device_now, is_pinned ? std::bit_ceil(size) : 0);
    }
    return {place, place, &give_back, device};
  }

  void check_room(size_t size) const {
    std::lock_guard held(guard);
    auto is_short = !is_pinned && live[device_now] + int64_t(size) > bytes_of_device;
    TORCH_CHECK_WITH(OutOfMemoryError, !is_short, "rehearsal device ", device_now, ": ", size,
                     " bytes of which ", bytes_of_device - live[device_now], " are free");
  }

  static void give_back(void* place) {
    if (!place) return;
    note_freed(place);
    free(place);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    memcpy(to, from, size);
  }
};

inline Allocator near_memory(false), pinned_memory(true);

inline bool is_pinned(const void* place) {
  std::lock_guard held(guard);
  auto* block = block_at(place);
  return block && block->device == PINNED;
}

// Memory that an op of the CPU has made becomes the device's, and is given back with it.
inline c10::Storage taken_over(const c10::Storage& made) {
  auto give_back = [](void* context) {
    auto* storage = (c10::Storage*)context;
    note_freed(storage->mutable_data());
    delete storage;
  };
  void* place = made.mutable_data();
  near_memory.check_room(made.nbytes());
  note_made(place, made.nbytes(), device_now);
  c10::DataPtr data(place, new c10::Storage(made), give_back, c10::Device(KIND, device_now));
  return c10::Storage(c10::Storage::use_byte_size_t(), made.nbytes(), std::move(data), &near_memory,
                      true);
}

// Makes a storage larger or smaller; what fits of its content stays.
inline void resize(c10::StorageImpl* storage, size_t size) {
  auto data = near_memory.allocate(size);
  if (auto kept = std::min(size, storage->nbytes()))
    memcpy(data.mutable_get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(size);
}

}  // namespace rehearsal
