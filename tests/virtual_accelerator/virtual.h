// Devices in host memory that obey CUDA's rules on devices, streams and memory: errors instead of silent damage.
#pragma once
#include <ATen/ATen.h>

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace virtual_accelerator {
using at::Tensor;
using Tensors = std::vector<Tensor>;
constexpr int kDevices = 4, kStreams = 32;
// A vector clock: the number of operations of each stream that are known to be finished.
using Clock = std::array<uint64_t, kDevices * kStreams>;

// An operation whose result reaches its memory only when somebody has waited for it.
struct Pending {
  int stream = 0;
  uint64_t number = 0;
  std::function<void()> finish;
  std::function<bool()> is_ready = [] { return true; };
  const void* host_memory = nullptr;  // storage in host memory that has to stay unread until then
  std::atomic<bool> is_settled = false;
  void settle();

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

int current_device();
int current_stream(int device);  // an index of Clock
int exchange_stream(int device, int stream);
int new_stream(int device);
Clock clock_of(int stream);
void stream_waits(int stream, const Clock& clock);
void host_waits(const Clock& clock, const char* reason);  // counted unless the reason is null
bool is_finished(const Clock& clock);
void count(const std::string& name, int64_t amount = 1);
// Order an operation on a stream behind the work that the stream knows; raise if its memory was not free for that.
uint64_t launched(const std::string& name, const Tensors& reads, const Tensors& writes, int stream);
void record(const Tensor& tensor, int stream);
void defer(std::shared_ptr<Pending> pending, const Tensors& outputs);
// The same memory as a tensor of the CPU, by default when pending operations on it are done.
Tensor host_view(const Tensor& tensor, bool settles = true);
}  // namespace virtual_accelerator
