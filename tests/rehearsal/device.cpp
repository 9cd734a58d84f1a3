// The rehearsal device: a pretend accelerator for machines without one.  Device type, dispatch and
// autocast are those of the key that it is compiled for: CUDA's with AS_CUDA, else PrivateUse1's.
//
// It finds:         wrong places, a wrong current device, forks, races, memory given back too early,
//                   host synchronisations, pageable copies, bytes that nobody accounts for.
// It cannot find:   seconds, real overlap, the numerics of kernels, what an allocator or NCCL holds.
//
// Here: what torch asks of a device, and what Python asks of this one (library.py).
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include "ops.h"
#ifdef AS_CUDA
#include <ATen/detail/CUDAHooksInterface.h>
#else
#include <ATen/detail/PrivateUse1HooksInterface.h>
#endif

using namespace rehearsal;

static int index_of(c10::Device device) { return device.has_index() ? device.index() : device_now; }

static c10::Stream as_torch(c10::Device device, int64_t number) {
  return c10::Stream(c10::Stream::UNSAFE, device, number);
}

static Stream key_of(const c10::Stream& stream) {
  return stream_on(stream.device_index(), stream.id());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Index = c10::DeviceIndex;

  c10::DeviceType type() const override { return KIND; }
  Index deviceCount() const noexcept override { return num_devices; }
  Device getDevice() const override { return {KIND, Index(device_now)}; }
  void setDevice(Device device) const override { device_now = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override { device_now = index_of(device); }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    device_now = index_of(device);
    return before;
  }

  c10::Stream getStream(Device device) const override {
    auto index = index_of(device);
    return as_torch({KIND, Index(index)}, stream_now[index]);
  }
  c10::Stream getDefaultStream(Device device) const override { return as_torch(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    return as_torch(device, number_of(new_stream(index_of(device))));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    stream_now[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits_for_stream(key_of(stream));
  }
  void synchronizeDevice(Index index) const override {
    host_waits_for_device(index < 0 ? device_now : index);
  }

  void record(void** event, const c10::Stream& stream, Index, c10::EventFlag) const override {
    if (!*event) *event = new int64_t(new_event());
    ::record(*(int64_t*)*event, key_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_for(*(int64_t*)event, key_of(stream));
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override { host_waits_for_event(*(int64_t*)event); }
  void destroyEvent(void* event, Index) const noexcept override { delete (int64_t*)event; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    note_stream(data.get(), key_of(stream));
  }
};
static c10::impl::DeviceGuardImplRegistrar registered_guard(KIND, new Guard());
static int registered_memory = (c10::SetAllocator(KIND, &near_memory), 0);

#ifdef AS_CUDA
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
#else
struct Hooks : at::PrivateUse1HooksInterface {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize(storage.unsafeGetStorageImpl(), size);
  }
#endif
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices; }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  bool isPinnedPtr(const void* place) const override { return is_pinned(place); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};
#ifdef AS_CUDA
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks)
}  // namespace at
#else
static int registered_hooks = (at::RegisterPrivateUse1HooksInterface(new Hooks()), 0);
#endif

// ---- what Python asks ------------------------------------------------------------------------------

extern "C" {
void rehearsal_begin(int devices, int64_t bytes) { num_devices = devices, bytes_of_device = bytes; }
int64_t rehearsal_device() { return device_now; }
void rehearsal_enter(int device) { device_now = device; }
int64_t rehearsal_stream(int device) { return current_stream(device); }
int64_t rehearsal_new_stream(int device) { return new_stream(device); }
void rehearsal_set_stream(int64_t stream) { stream_now[stream >> 32] = number_of(stream); }
int64_t rehearsal_new_event() { return new_event(); }
void rehearsal_record(int64_t event, int64_t stream) { record(event, stream); }
void rehearsal_wait(int64_t event, int64_t stream) { wait_for(event, stream); }
void rehearsal_sync_event(int64_t event) { host_waits_for_event(event); }
void rehearsal_sync_stream(int64_t stream) { host_waits_for_stream(stream); }
void rehearsal_sync_device(int device) { host_waits_for_device(device); }
void rehearsal_record_stream(void* place, int64_t stream) { note_stream(place, stream); }
void rehearsal_use(void* place, int writes, int64_t stream, const char* op) {
  std::lock_guard held(guard);
  note_use_of(place, Use{stream, tick(stream), op}, writes);
}
void rehearsal_pin(void* place, int64_t size) { note_made(place, size, PINNED); }
void rehearsal_unpin(void* place) { note_freed(place); }
int64_t rehearsal_pinned() { return pinned_bytes; }
void rehearsal_sums_on(int64_t stream) {
  std::lock_guard held(guard);
  sum_streams.insert(stream);
}
void rehearsal_begin_work(int64_t work, int64_t stream) {
  std::lock_guard held(guard);
  under_way.insert(work);
  awaited_by_work[work].swap(awaited[stream]);
}
void rehearsal_await(int64_t work, int64_t stream) {
  std::lock_guard held(guard);
  awaited[stream].insert(work);
}
int rehearsal_settle(int64_t stream) { return settle_quietly(stream); }
int rehearsal_settle_work(int64_t work) {  // whether what it is queued behind has been done
  Works before;
  {
    std::lock_guard held(guard);  // other threads begin and end theirs
    if (auto at = awaited_by_work.find(work); at != awaited_by_work.end()) before = at->second;
  }
  try {
    settle(before);
  } catch (std::runtime_error&) {
    return 0;
  }
  return 1;
}
void rehearsal_end_work(int64_t work, const char* problem) {
  std::lock_guard held(guard);
  if (*problem) failed[work] = problem;
  under_way.erase(work);
  awaited_by_work.erase(work);
  work_ended.notify_all();
}
int64_t rehearsal_is_behind(int64_t stream, int64_t other) {
  std::lock_guard held(guard);
  return clocks[stream][other] >= clocks[other][other];
}
int64_t rehearsal_beside() { return ops_beside_sums; }
void rehearsal_resize(void* storage, int64_t size) { resize((c10::StorageImpl*)storage, size); }
void rehearsal_seed(int device, uint64_t seed) { generator_of(device).set_current_seed(seed); }
int64_t rehearsal_state(int device, uint8_t* place, int64_t size) {  // copies it out, if it fits
  auto state = generator_of(device).get_state();
  if (state.nbytes() <= size_t(size)) memcpy(place, state.data_ptr(), state.nbytes());
  return state.nbytes();
}
void rehearsal_set_state(int device, uint8_t* place, int64_t size) {
  auto state = at::empty({size}, at::kByte);
  memcpy(state.data_ptr(), place, size);
  generator_of(device).set_state(state);
}
int64_t rehearsal_live(int device) { return live[device]; }
int64_t rehearsal_peak(int device) { return peak[device]; }
void rehearsal_reset_peak(int device) { peak[device] = live[device]; }
int64_t rehearsal_ops() { return num_ops; }
int64_t rehearsal_syncs() { return host_syncs; }
int64_t rehearsal_pageable() { return pageable_copies; }
int64_t rehearsal_races() { return races.size(); }
const char* rehearsal_race(int64_t number) { return races[number].c_str(); }
}
