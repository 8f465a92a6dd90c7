// The fields of an optimizer's options and state (optimizer_kinds.h) in LibTorch's archives.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ddp/internal/optimizer_kinds.h>
#include <torch/serialize/archive.h>

namespace ddp::detail {

struct ArchiveWriter : NoFields {
  explicit ArchiveWriter(torch::serialize::OutputArchive& to) : archive(to) {}

  void number(const char* name, double value) { archive.write(name, value); }
  void scalar(const char* name, double value) { archive.write(name, value); }
  void count(const char* name, int64_t value) { archive.write(name, value); }
  void step(const char* name, int64_t value) { archive.write(name, value); }
  void flag(const char* name, bool value) { archive.write(name, value); }
  void pair(const char* name, const std::tuple<double, double>& value) {
    archive.write(name, c10::IValue(value));
  }
  void triple(const char* name, const std::tuple<double, double, double>& value) {
    archive.write(name, c10::IValue(value));
  }
  void text(const char* name, const std::optional<std::string>& value) {
    archive.write(name, value ? c10::IValue(*value) : c10::IValue());
  }
  void dtype(const char* name, at::ScalarType value) {
    archive.write(name, static_cast<int64_t>(value));
  }
  void tensor(const char* name, const at::Tensor& value, bool /*is_required*/) {
    if (value.defined()) archive.write(name, c10::IValue(value));
  }

  torch::serialize::OutputArchive& archive;
};

struct ArchiveReader : NoFields {
  explicit ArchiveReader(torch::serialize::InputArchive& from) : archive(from) {}

  void number(const char* name, double& value) { value = read(name).toDouble(); }
  void scalar(const char* name, double& value) { value = read(name).toDouble(); }
  void count(const char* name, int64_t& value) { value = read(name).toInt(); }
  void step(const char* name, int64_t& value) { value = read(name).toInt(); }
  void flag(const char* name, bool& value) { value = read(name).toBool(); }
  void pair(const char* name, std::tuple<double, double>& value) {
    value = read(name).to<std::tuple<double, double>>();
  }
  void triple(const char* name, std::tuple<double, double, double>& value) {
    value = read(name).to<std::tuple<double, double, double>>();
  }
  void text(const char* name, std::optional<std::string>& value) {
    value = read(name).toOptional<std::string>();
  }
  void dtype(const char* name, at::ScalarType& value) {
    value = static_cast<at::ScalarType>(read(name).toInt());
  }
  void tensor(const char* name, at::Tensor& value, bool /*is_required*/) {
    c10::IValue saved;
    if (archive.try_read(name, saved)) value = saved.toTensor();
  }

  torch::serialize::InputArchive& archive;

 private:
  c10::IValue read(const char* name) {
    c10::IValue saved;
    archive.read(name, saved);
    return saved;
  }
};

}  // namespace ddp::detail
