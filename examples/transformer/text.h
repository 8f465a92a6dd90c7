#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace transformer {

/// A text as numbers: each character's place among those that occur, in the order of their codes.
class Text {
 public:
  /// \param characters  in UTF-8.
  /// \param name        of the text, for error texts.
  Text(const std::string& characters, std::string name);

  /// \throws c10::ValueError  no such file.
  static Text read(const std::string& path);

  /// \return [n] int64.
  /// \throws c10::ValueError  a character that does not occur in the text.
  at::Tensor encode(const std::string& characters) const;
  /// \param numbers  [n] int64.
  std::string decode(const at::Tensor& numbers) const;

  const std::string& name() const { return name_; }
  /// The whole text, [size] int64.
  const at::Tensor& numbers() const { return numbers_; }
  int64_t size() const { return numbers_.size(0); }
  /// The number of different characters.
  int64_t vocabulary() const { return static_cast<int64_t>(vocabulary_.size()); }

 private:
  std::string name_;
  std::vector<std::string> vocabulary_;
  at::Tensor numbers_;
};

/// Parts of a text, and the characters to predict for them.
struct Batch {
  at::Tensor input;   // [N, context] int64
  at::Tensor target;  // the same, one character further
};

/// A text cut into windows of `context` characters, one after the other.
class Windows {
 public:
  /// \param numbers  [n] int64, n > context.
  Windows(const at::Tensor& numbers, int64_t context)
      : windows_(numbers.unfold(0, context + 1, context)) {}

  size_t size() const { return static_cast<size_t>(windows_.size(0)); }
  Batch at(const std::vector<size_t>& indices) const;

 private:
  at::Tensor windows_;  // [size, context + 1]: each with the character after it
};

/// The part to train on, and the last tenth of the text, which is held out.
struct Split {
  Windows train, held_out;
};

/// \throws c10::ValueError  the text is too short for such windows.
Split split(const Text& text, int64_t context);

}  // namespace transformer
