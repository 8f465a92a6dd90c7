// A small task for examples about other subjects: to recognize the digit in an image.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

namespace CLI {
class App;
}

namespace examples {

struct DigitsOptions {
  std::string data;  // a folder with MNIST's files; the digits of this repository by default
  std::string backend;
  int64_t epochs = 5;
  size_t batch_size = 32;
  int64_t hidden = 128;  // width of the network
  double lr = 0.1;

  DigitsOptions();
};

/// Adds the options above to a program's. Collective: no.
void add_digits_options(CLI::App& app, DigitsOptions& options);

/// Images as rows of pixels, [N, height * width] float with mean 0 and deviation 1; [N] labels.
struct Digits {
  at::Tensor pixels, labels;

  int64_t size() const { return labels.size(0); }
  /// Selects the digits of these indices.
  Digits at(const std::vector<size_t>& indices) const;
};

/// \param split  "train" or "t10k".
///
/// Collective: where there is a default group; throws on all ranks if one cannot read the files.
Digits read_digits(const DigitsOptions& options, const std::string& split);

/// Makes a network of two hidden layers, with the same weights on every rank.
torch::nn::Sequential make_classifier(const Digits& digits, const DigitsOptions& options);

/// Returns the percentage of digits that the network classifies correctly. Collective: no.
double percent_right(torch::nn::Sequential& net, const Digits& digits);

}  // namespace examples
