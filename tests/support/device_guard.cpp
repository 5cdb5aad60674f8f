// PyTorch's door to the simulated device: torch.Stream, torch.Event and torch.accelerator ask what `answer` answers.
// See device_guard.py, which sets it. The current stream is kept here, per thread, as autograd's engine changes it often.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <mutex>
#include <unordered_set>

namespace {

// As in device_guard.py.
enum class Ask : int { NewStream, Record, RecordTimed, Wait, IsDone, HostWaits, HostWaitsForAll,
                       Elapsed, Forget, PeakBytes, ResetPeak };
constexpr int64_t NO_TIME = -1;

int64_t (*answer)(int ask, int64_t first, int64_t second) = nullptr;
thread_local int64_t current = 0;  // the number of a stream; 0 is the device's default one

int64_t ask(Ask what, const void* event = nullptr, int64_t second = 0) {
  return answer ? answer(static_cast<int>(what), reinterpret_cast<int64_t>(event), second) : 0;
}
c10::Device here() { return {c10::DeviceType::PrivateUse1, 0}; }
c10::Stream stream_of(int64_t number) { return c10::Stream(c10::Stream::UNSAFE, here(), number); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return here(); }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(ask(Ask::NewStream)); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current, stream.id()));
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const override {
    auto what = flag == c10::EventFlag::BACKEND_DEFAULT ? Ask::RecordTimed : Ask::Record;
    *event = reinterpret_cast<void*>(ask(what, *event, stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override { ask(Ask::Wait, event, stream.id()); }
  bool queryEvent(void* event) const override { return ask(Ask::IsDone, event); }
  void synchronizeEvent(void* event) const override { ask(Ask::HostWaits, event); }
  void synchronizeDevice(c10::DeviceIndex) const override { ask(Ask::HostWaitsForAll); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { ask(Ask::Forget, event); }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    auto ns = ask(Ask::Elapsed, first, reinterpret_cast<int64_t>(second));
    TORCH_CHECK(ns != NO_TIME, "an event has no time, or the host has not waited for it");
    return ns / 1e6;
  }
};

struct Memory final : c10::DeviceAllocator {  // its tensors are CPU tensors inside: it only counts
  c10::DataPtr allocate(size_t) override { TORCH_CHECK(false, "tensors on sim are made by tensors.py"); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "tensors on sim have no address"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { ask(Ask::ResetPeak); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].peak = ask(Ask::PeakBytes);
    return stats;
  }
};

struct Pinned final : c10::Allocator {
  static inline std::mutex mutex;
  static inline std::unordered_set<const void*> pointers;
  static void release(void* pointer) {
    std::lock_guard<std::mutex> guard(mutex);
    pointers.erase(pointer);
    std::free(pointer);
  }
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::mutex> guard(mutex);
    auto pointer = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    pointers.insert(pointer);
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  bool isPinnedPtr(const void* pointer) const override {
    std::lock_guard<std::mutex> guard(Pinned::mutex);
    return Pinned::pointers.count(pointer);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* pinned = new Pinned;
    return pinned;
  }
};

}  // namespace

extern "C" {
// `function` is null when the process ends, where Python's functions are gone.
void set_answer(int64_t (*function)(int, int64_t, int64_t)) { answer = function; }
int64_t current_stream() { return current; }
void register_device() {
  c10::impl::registerDeviceGuard(c10::DeviceType::PrivateUse1, new Guard);
  c10::SetAllocator(c10::DeviceType::PrivateUse1, new Memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}
}
