// What rounds in a program, which of its ranks train by themselves, and what that does to its
// values.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "differential/plan.h"

namespace ddp::differential {

constexpr double kOfHalf = 1.0 / (1 << 11), kOfBFloat16 = 1.0 / (1 << 8),
                 kOfFloat = 1.0 / (1 << 24), kOfDouble = 1.0 / (int64_t{1} << 52);

/// The dtypes of a program, and the relative errors of what it computes and sends.
struct Precision {
  at::ScalarType module = torch::kDouble, forward = torch::kDouble;
  std::optional<at::ScalarType> buffers, output;
  bool autocast = false, casts_inputs = false;
  double of_forward = 0;     ///< of parameters in forward
  double of_gradients = 0;   ///< of each rank's gradients on their way to the average
  double of_parameters = 0;  ///< of a step
  double of_wire = 0;        ///< of what a region sends
  double least = 0;          ///< absolute: gradients below it may become zero on their way
};
Precision precision_of(const Program& program);
/// Whether the parameters of a layer keep their dtype in forward.
bool keeps_dtype(const Program& program, const std::string& layer);

/// Adds to tensors as much as rounding may, with the signs that a seed says; 0 adds nothing.
class Noise {
 public:
  explicit Noise(uint64_t seed) : seed_(seed) {}
  void add(const at::Tensor& to, double relative, double absolute = 0);

 private:
  uint64_t seed_;
};

/// By rank and name, how far a value may be from the reference: what ten noises do to it,
/// times 8. Infinite for what the reference does not know.
std::vector<std::map<std::string, double>> bounds_of(
    const Program& program, const std::vector<Record>& expected);

/// The ranks that average gradients with each other in a step have the same number.
std::vector<int> regions_of(const Program& program, int step);
/// The rank whose buffers this one gets with averaged gradients.
size_t source_of_buffers(const Program& program, size_t rank);
/// Whether ranks may have other parameters at some time.
bool drifts(const Program& program);
/// Whether all ranks have the same ones after a step.
bool are_equal_after(const Program& program, int step);
/// Whether ranks in training=averager|diloco have a wrapper.
bool is_wrapped(const Program& program);

/// Averages the copies of parameters that ranks have, with LibTorch alone.
class Averages {
 public:
  using OfAll = std::vector<std::vector<at::Tensor>>;
  Averages(const Program& program, Noise& noise) : program_(program), noise_(noise) {}
  void begin(const OfAll& ranks);
  void after_step(int step, const OfAll& ranks);
  void finish(const OfAll& ranks);

 private:
  void average(const OfAll& ranks, size_t first, size_t size);
  void arrive(const OfAll& ranks);

  const Program& program_;
  Noise& noise_;
  at::Tensor outer_, momentum_, mean_;  // flat; the mean on its way
  int64_t from_ = 0, due_ = -1;
};

/// The rate and, where it cycles, the momentum of a step, by the schedule's formula.
struct Rate {
  double rate;
  std::optional<double> momentum;
};
Rate rate_of(const Program& program, int step, double initial);
/// Sets them.
void set_rates(const Program& program, int step, torch::optim::Optimizer& optimizer);

/// Whether a rank's gradients are infinite in a step.
bool overflows(const Program& program, int step, int rank);

}  // namespace ddp::differential
