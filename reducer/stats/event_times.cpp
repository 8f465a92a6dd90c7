#include "stats/event_times.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include <c10/core/StreamGuard.h>
#include <ddp/internal/current_stream.h>

namespace ddp {

EventTimes::Moment moment_on(c10::Device device) {
  // The default flag is the one with times.
  auto moment = std::make_shared<c10::Event>(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  moment->record(current_stream_of(device));
  return moment;
}

EventTimes::EventTimes(c10::Device device, Moment before)
    : device_(device), before_(std::move(before)), begin_(moment_on(device)) {}

void EventTimes::arm(size_t buckets) {
  const std::lock_guard lock(mutex_);
  buckets_.assign(buckets, {});
}

void EventTimes::backward() { backward_ = moment_on(device_); }
void EventTimes::computed() { computed_ = moment_on(device_); }
void EventTimes::end(Moment end) { end_ = std::move(end); }

template <typename Set>
void EventTimes::set(size_t bucket, const Set& set) {
  const std::lock_guard lock(mutex_);
  if (bucket < buckets_.size()) set(buckets_[bucket]);
}

void EventTimes::ready(size_t bucket) {
  set(bucket, [&](BucketMoments& m) {
    if (!m.launched) m.ready = moment_on(device_);  // another thread may have launched it
  });
}

void EventTimes::launched(size_t bucket) {
  set(bucket, [&](BucketMoments& m) {
    m.launched = moment_on(device_);
    if (!m.ready) m.ready = m.launched;  // no gradient to wait for
  });
}

void EventTimes::done(size_t bucket, c10d::Work& work) {
  const c10::impl::VirtualGuardImpl streams(device_.type());
  auto stream = streams.getStreamFromGlobalPool(device_);
  // The pool hands out its streams in turns, and the program may have this one from it.
  if (stream == current_stream_of(device_)) stream = streams.getStreamFromGlobalPool(device_);
  const c10::StreamGuard side(stream);
  work.synchronize();
  done(bucket);
}

void EventTimes::done(size_t bucket) {
  set(bucket, [&](BucketMoments& m) {
    if (!m.done) m.done = moment_on(device_);
  });
}

bool EventTimes::are_over() const {
  const auto all_over = [](std::initializer_list<const Moment*> moments) {
    return std::all_of(moments.begin(), moments.end(), [](const Moment* moment) {
      return !*moment || (*moment)->query();
    });
  };
  if (!end_ || !all_over({&end_, &computed_, &backward_, &begin_, &before_})) return false;
  const std::lock_guard lock(mutex_);
  return std::all_of(buckets_.begin(), buckets_.end(), [&](const BucketMoments& m) {
    return all_over({&m.done, &m.launched, &m.ready});
  });
}

void EventTimes::write(StepStats& stats) const {
  const auto since_begin = [this](const Moment& moment) {
    return moment ? begin_->elapsedTime(*moment) : -1;
  };
  stats.forward_ms = since_begin(backward_);
  stats.compute_ms = since_begin(computed_);
  stats.total_ms = since_begin(end_);
  if (before_) stats.step_ms = before_->elapsedTime(*end_);
  const std::lock_guard lock(mutex_);
  for (size_t b = 0; b < buckets_.size() && b < stats.buckets.size(); ++b) {
    stats.buckets[b].ready_ms = since_begin(buckets_[b].ready);
    stats.buckets[b].launched_ms = since_begin(buckets_[b].launched);
    stats.buckets[b].done_ms = since_begin(buckets_[b].done);
  }
}

}  // namespace ddp
