#include "backends/gloo/message.h"

#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <ddp/internal/check.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/system/start_thread.h>

#include "base/deadline.h"

namespace ddp::backends {
namespace {

constexpr size_t kMostInPacket = size_t{64} << 10;

at::Tensor packet_of(size_t bytes_of_elements) {
  return at::empty({static_cast<int64_t>(sizeof(MessageHeader) + bytes_of_elements)}, at::kByte);
}

}  // namespace

bool fits_in_packet(const at::Tensor& tensor) { return tensor.nbytes() <= kMostInPacket; }

int elements_tag(const at::Tensor& tensor, int tag) {
  constexpr uint64_t kMask = 0x1fffffff;  // close_connection() uses the larger ones
  const uint64_t fields[] = {
      static_cast<uint64_t>(tag), static_cast<uint64_t>(tensor.scalar_type()),
      static_cast<uint64_t>(tensor.numel())};
  return kMostTag + 1 + static_cast<int>(hash_of_bytes(fields, sizeof fields) & kMask);
}

at::Tensor make_packet(const at::Tensor& tensor) {
  const bool holds_elements = fits_in_packet(tensor);
  auto packet = packet_of(holds_elements ? tensor.nbytes() : 0);
  const MessageHeader header{tensor.numel(), static_cast<int64_t>(tensor.scalar_type())};
  auto* bytes = packet.mutable_data_ptr<uint8_t>();
  std::memcpy(bytes, &header, sizeof header);
  if (holds_elements && tensor.nbytes() > 0) {
    std::memcpy(bytes + sizeof header, tensor.const_data_ptr(), tensor.nbytes());
  }
  return packet;
}

at::Tensor empty_packet() { return packet_of(kMostInPacket); }

void copy_elements(const at::Tensor& packet, const at::Tensor& tensor) {
  if (tensor.nbytes() == 0) return;
  const auto* elements =
      static_cast<const uint8_t*>(packet.const_data_ptr()) + sizeof(MessageHeader);
  std::memcpy(tensor.mutable_data_ptr(), elements, tensor.nbytes());
}

MessageHeader header_of(const at::Tensor& packet) {
  MessageHeader header;
  std::memcpy(&header, packet.const_data_ptr(), sizeof header);
  return header;
}

GlooPointToPoint::GlooPointToPoint(
    WorkPtr first, Transfer transfer, std::chrono::milliseconds timeout)
    : c10d::Work(-1, first->retrieveOpType()),
      first_(std::move(first)),
      timeout_(timeout),
      transfer_(std::move(transfer)),
      current_(first_) {}

GlooPointToPoint::~GlooPointToPoint() {
  if (!waiter_.joinable()) return;
  if (!owner_.is_this_one()) {  // a forked process does not have the thread
    waiter_.detach();
    return;
  }
  if (!Work::isCompleted()) abort();
  waiter_.join();
}

void GlooPointToPoint::start() {
  if (claim()) waiter_ = start_thread([this] { finish_transfer(timeout_); });
}

bool GlooPointToPoint::isCompleted() {
  start();
  return Work::isCompleted();
}

bool GlooPointToPoint::wait(std::chrono::milliseconds timeout) {
  if (claim()) finish_transfer(timeout == kNoTimeout ? timeout_ : timeout);
  return Work::wait(timeout) && arrived_;
}

void GlooPointToPoint::abort() {
  WorkPtr current;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = true;
    current = current_;
  }
  current->abort();
}

bool GlooPointToPoint::claim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !std::exchange(claimed_, true);
}

bool GlooPointToPoint::wait_for(const WorkPtr& work, std::chrono::milliseconds timeout) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) return false;
    current_ = work;
  }
  return work->wait(timeout);
}

void GlooPointToPoint::finish_transfer(std::chrono::milliseconds timeout) {
  const Deadline deadline(timeout);
  const auto error = exception_of([&] {
    arrived_ = transfer_([&](const WorkPtr& work) { return wait_for(work, deadline.left()); });
  });
  transfer_ = nullptr;
  finish(error);
}

}  // namespace ddp::backends
