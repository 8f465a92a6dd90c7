#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// A tensor as its receiver has to know it before it comes.
struct TensorDescription {
  bool is_defined = false;  // if not, nothing is sent for it
  bool requires_grad = false;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes = {};
};

TensorDescription description_of(const at::Tensor& tensor);
/// "[4, 128, 512] Float"; "nothing" for an undefined tensor.
std::string text_of(const TensorDescription& tensor);
/// The same of several: "[4, 8] Float and [4] Long".
std::string text_of(const std::vector<TensorDescription>& tensors);

/// A step() or an eval() of a rank.
struct StageCall {
  int64_t number = 0;  // from 1; the same on all ranks
  bool trains = false;
};

/// Goes before the tensors of a message between two stages, because micro-batches may differ in
/// size, and steps in shapes.
struct StageMessageHeader {
  char kind = 'F';         // of the action that sends: activations ('F') or gradients ('B')
  int64_t stage = 0;       // that sends
  int64_t microbatch = 0;  // from 0
  bool is_filler = false;  // it has no rows of the batch, and its output is left out
  StageCall call = {};
  std::vector<TensorDescription> tensors = {};
};

/// The length of a header: 256 bytes. A longer one continues in a second part.
constexpr int64_t kHeaderWords = 32;

/// At least kHeaderWords numbers: the header, and after them the second part.
std::vector<int64_t> words_of(const StageMessageHeader& header);
/// How many numbers the second part has.
///
/// \param words  the first kHeaderWords.
/// \throws c10::Error  if they are no header.
int64_t words_of_second_part(const std::vector<int64_t>& words);
StageMessageHeader header_of(const std::vector<int64_t>& words);

/// \throws c10::Error  if a message is of another action, or of another call. Their tags are the
///         same in each call.
void check_header(
    const StageMessageHeader& header, const StageMessageHeader& expected,
    const std::string& on_rank);

/// The error of a stage whose forward cannot use the tensors of a micro-batch, though it used those
/// of others.
///
/// \param expected  what it could use.
/// \param header  of what it got.
/// \param on_rank  "on rank 1 of 2".
std::string text_of_width_error(
    const std::vector<TensorDescription>& expected, const StageMessageHeader& header,
    const std::string& on_rank);

/// Whether tensors differ in more than the sizes of dimension 0, which are rows.
bool differ_in_width(
    const std::vector<TensorDescription>& one, const std::vector<TensorDescription>& other);

}  // namespace ddp
