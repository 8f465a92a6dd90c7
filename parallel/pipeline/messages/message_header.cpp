#include "pipeline/messages/message_header.h"

#include <algorithm>
#include <cstddef>

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

#include "pipeline/schedule.h"

namespace ddp {
namespace {

// So that the elements of a tensor are not taken for a header.
constexpr int64_t kMagic = 0x64647070706c6e31;
// The numbers before the descriptions of tensors.
constexpr size_t kFixedWords = 9;

// Bits of a tensor's first number.
constexpr int64_t kDefined = 1, kRequiresGrad = 2;
constexpr int kDtypeShift = 8, kDimsShift = 16;
constexpr int64_t kDtypeMask = 0xff;

void append(const TensorDescription& tensor, std::vector<int64_t>& words) {
  const auto dims = static_cast<int64_t>(tensor.sizes.size());
  words.push_back(
      (tensor.is_defined ? kDefined : 0) | (tensor.requires_grad ? kRequiresGrad : 0) |
      static_cast<int64_t>(tensor.dtype) << kDtypeShift | dims << kDimsShift);
  words.insert(words.end(), tensor.sizes.begin(), tensor.sizes.end());
}

std::string message_text(const StageMessageHeader& header) {
  return ddp::str(
      action_text(header.kind, header.microbatch, header.stage), " in call ", header.call.number,
      header.call.trains ? ", step()" : ", eval()");
}

}  // namespace

TensorDescription description_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {true, tensor.requires_grad(), tensor.scalar_type(), tensor.sizes().vec()};
}

std::string text_of(const TensorDescription& tensor) {
  if (!tensor.is_defined) return "nothing";
  return ddp::str("[", joined_by(", ", tensor.sizes), "] ", tensor.dtype);
}

std::string text_of(const std::vector<TensorDescription>& tensors) {
  std::vector<std::string> texts;
  for (const auto& tensor : tensors) texts.push_back(text_of(tensor));
  return texts.empty() ? "no tensors" : joined_by(" and ", texts);
}

std::vector<int64_t> words_of(const StageMessageHeader& header) {
  std::vector<int64_t> words{
      kMagic,
      header.kind,
      header.stage,
      header.microbatch,
      0,
      static_cast<int64_t>(header.tensors.size()),
      header.is_filler ? 1 : 0,
      header.call.number,
      header.call.trains ? 1 : 0};
  for (const auto& tensor : header.tensors) append(tensor, words);
  words.resize(std::max(words.size(), static_cast<size_t>(kHeaderWords)));
  words[4] = static_cast<int64_t>(words.size()) - kHeaderWords;
  return words;
}

int64_t words_of_second_part(const std::vector<int64_t>& words) {
  DDP_CHECK(
      words.at(0) == kMagic,
      "PipelineStage: expected the header of a message between stages, got other bytes. Send "
      "nothing else in the stages' process group during a step.");
  return words.at(4);
}

StageMessageHeader header_of(const std::vector<int64_t>& words) {
  StageMessageHeader header;
  header.kind = static_cast<char>(words.at(1));
  header.stage = words.at(2);
  header.microbatch = words.at(3);
  header.is_filler = words.at(6) != 0;
  header.call = {words.at(7), words.at(8) != 0};
  auto at = kFixedWords;
  for (int64_t i = 0; i < words.at(5); ++i) {
    const auto bits = words.at(at++);
    TensorDescription tensor;
    tensor.is_defined = (bits & kDefined) != 0;
    tensor.requires_grad = (bits & kRequiresGrad) != 0;
    tensor.dtype = static_cast<at::ScalarType>(bits >> kDtypeShift & kDtypeMask);
    for (auto dims = bits >> kDimsShift; dims > 0; --dims) tensor.sizes.push_back(words.at(at++));
    header.tensors.push_back(std::move(tensor));
  }
  return header;
}

void check_header(
    const StageMessageHeader& header, const StageMessageHeader& expected,
    const std::string& on_rank) {
  const auto got = message_text(header), wanted = message_text(expected);
  DDP_CHECK(
      got == wanted, "PipelineStage: expected a message of ", wanted, ", got one of ", got, " ",
      on_rank, ". Call step() and eval() on all ranks, in the same order.");
}

std::string text_of_width_error(
    const std::vector<TensorDescription>& expected, const StageMessageHeader& header,
    const std::string& on_rank) {
  return ddp::str(
      "PipelineStage: expected from stage ", header.stage, " ", text_of(expected),
      " for micro-batch ", header.microbatch, ", got ", text_of(header.tensors), " ", on_rank,
      ". Stages have to be cut at the same width.");
}

bool differ_in_width(
    const std::vector<TensorDescription>& one, const std::vector<TensorDescription>& other) {
  const auto same = [](const TensorDescription& a, const TensorDescription& b) {
    return a.is_defined == b.is_defined && a.dtype == b.dtype && a.sizes.size() == b.sizes.size() &&
           (a.sizes.empty() || std::equal(a.sizes.begin() + 1, a.sizes.end(), b.sizes.begin() + 1));
  };
  return !std::equal(one.begin(), one.end(), other.begin(), other.end(), same);
}

}  // namespace ddp
