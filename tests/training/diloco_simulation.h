// DiLoCo's regions in one process, in double: what those of the library have to be equal to.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/diloco.h>

namespace ddp::diloco_simulation {

using Tensors = std::vector<at::Tensor>;

// A region's parameters, and its inner steps towards a place of its own.
inline Tensors begin_parameters(int64_t region) {
  const auto make = [&](at::IntArrayRef sizes, double from) {
    const auto count = at::empty(sizes).numel();
    return (at::arange(count, at::kDouble) * 0.37 + from + static_cast<double>(region))
        .sin()
        .to(at::kFloat)
        .view(sizes);
  };
  return {make({5, 7}, 0.1), make({3}, 0.5), make({2, 3, 4, 2}, 0.9)};
}

inline at::Tensor inner_step(const at::Tensor& flat, int64_t region, int64_t step) {
  const auto place =
      (at::arange(flat.numel(), at::kDouble) * 0.21 + static_cast<double>(region)).cos();
  const double rate = 0.02 + 0.01 * static_cast<double>((step + region) % 3);
  return flat - (flat - place.to(flat.scalar_type())) * rate;
}

inline at::Tensor flat_of(const Tensors& parameters) {
  Tensors flat;
  for (const auto& parameter : parameters) flat.push_back(parameter.flatten());
  return at::cat(flat);
}

inline void take_inner_step(const Tensors& parameters, int64_t region, int64_t step) {
  const auto next = inner_step(flat_of(parameters), region, step);
  int64_t at = 0;
  for (const auto& parameter : parameters) {
    parameter.copy_(next.narrow(0, at, parameter.numel()).view(parameter.sizes()));
    at += parameter.numel();
  }
}

/// When a region that begins with the others is away.
struct Absence {
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  int64_t after = kNever;  // this step it has left
  int64_t until = kNever;  // the exchange after this step, which it watches
};

/// The regions' parameters after so many steps.
inline Tensors simulate(
    int64_t regions, const DiLoCoOptions& options, int64_t steps,
    const std::map<int64_t, Absence>& absences = {}) {
  auto outer = flat_of(begin_parameters(0)).to(at::kDouble);
  auto momentum = at::zeros_like(outer);
  Tensors flat(static_cast<size_t>(regions), outer);
  const int64_t elements = outer.numel();
  const auto absence_of = [&](int64_t region) {
    const auto found = absences.find(region);
    return found == absences.end() ? Absence() : found->second;
  };
  struct OnItsWay {
    int64_t from, size, due;
    at::Tensor mean;
  };
  std::optional<OnItsWay> sent;
  const auto arrive = [&] {
    auto o = outer.narrow(0, sent->from, sent->size);
    auto m = momentum.narrow(0, sent->from, sent->size);
    m.copy_(options.outer_momentum() * m + sent->mean);
    o.sub_(
        options.outer_lr() * (options.nesterov() ? sent->mean + options.outer_momentum() * m : m));
    for (auto& p : flat) {
      p = p.clone();
      auto own = p.narrow(0, sent->from, sent->size);
      own.copy_(options.mix() * own + (1 - options.mix()) * o);
    }
    sent.reset();
  };
  for (int64_t step = 1; step <= steps; ++step) {
    for (int64_t r = 0; r < regions; ++r) {
      flat[static_cast<size_t>(r)] = inner_step(flat[static_cast<size_t>(r)], r, step - 1);
    }
    if (sent && sent->due == step) arrive();
    for (int64_t f = 0; f < options.fragments(); ++f) {
      const int64_t turn = options.sync_every() * (f + 1) / options.fragments();
      if (step % options.sync_every() != turn % options.sync_every()) continue;
      const int64_t from = elements * f / options.fragments();
      const int64_t size = elements * (f + 1) / options.fragments() - from;
      auto mean = at::zeros({size}, at::kDouble);
      int64_t counted = 0;
      for (int64_t r = 0; r < regions; ++r) {
        auto& p = flat[static_cast<size_t>(r)];
        const auto [after, until] = absence_of(r);
        if (step == until) p = outer.clone();
        if (step > after && step <= until) continue;
        mean += (outer - p).narrow(0, from, size);
        ++counted;
      }
      sent = OnItsWay{from, size, step + options.overlap(), mean / counted};
      if (options.overlap() == 0) arrive();
    }
  }
  if (sent) arrive();
  return flat;
}

}  // namespace ddp::diloco_simulation
