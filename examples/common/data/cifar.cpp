#include "cifar.h"

#include <cstdint>
#include <vector>

#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace examples {
namespace {

constexpr int64_t kPixelBytes = 3 * 32 * 32;

struct LabelByte {
  const char* kind;
  int64_t classes;
};

/// A data set's format: files are records without a header, a byte for each label, then the pixels.
struct CifarFormat {
  const char* name;
  const char* record;  // description of a record
  std::vector<LabelByte> labels;
  std::vector<std::string> train;
  std::vector<std::string> test;
  const char* archive;
  const char* archived_folder;  // the folder within the archive
  const char* script;           // that downloads the archive

  int64_t record_bytes() const { return static_cast<int64_t>(labels.size()) + kPixelBytes; }
};

const CifarFormat kCifar10{
    "CIFAR-10",
    "a label and 3072 bytes of pixels",
    {{"labels", 10}},
    {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin",
     "data_batch_5.bin"},
    {"test_batch.bin"},
    "cifar-10-binary.tar.gz",
    "cifar-10-batches-bin",
    "scripts/download_cifar.sh"};

const CifarFormat kCifar100{
    "CIFAR-100",
    "a coarse label, a fine label and 3072 bytes of pixels",
    {{"coarse labels", 20}, {"fine labels", 100}},
    {"train.bin"},
    {"test.bin"},
    "cifar-100-binary.tar.gz",
    "cifar-100-binary",
    "scripts/download_cifar.sh --100"};

const CifarFormat& other_than(const CifarFormat& format) {
  return &format == &kCifar10 ? kCifar100 : kCifar10;
}

const std::vector<std::string>& files_of(const CifarFormat& format, const std::string& split) {
  TORCH_CHECK_VALUE(
      split == "train" || split == "test", format.name,
      ": expected the split \"train\" or \"test\", found \"", split, "\".");
  return split == "train" ? format.train : format.test;
}

std::string missing_cifar_remedy(
    const CifarFormat& format, const std::string& folder, const std::string& name) {
  const std::string archive = folder + "/" + format.archive;
  const std::string unpacked = folder + "/" + format.archived_folder;
  if (is_file(unpacked + "/" + name)) return "Pass " + unpacked + ", which has it.";
  if (is_file(archive)) {
    return "Unpack " + archive + " with tar -xzf " + archive + " -C " + folder + " and pass " +
           unpacked + ".";
  }
  const CifarFormat& other = other_than(format);
  for (const auto* names : {&other.train, &other.test}) {
    for (const auto& found : *names) {
      if (!is_file(folder + "/" + found)) continue;
      return c10::str(
          "The folder has ", found, ", a name of ", other.name,
          "'s files: read it as that, or pass one of ", format.name, ".");
    }
  }
  return c10::str(
      "Pass a folder with the binary version of ", format.name, ", as ", format.script,
      " makes it.");
}

/// The records of a file, [N, record_bytes].
at::Tensor read_records(DataFile& file, const CifarFormat& format) {
  const auto size = static_cast<int64_t>(file.size());
  const int64_t record = format.record_bytes();
  const std::string expected =
      c10::str("records of ", record, " bytes (", format.name, ": ", format.record, ")");
  TORCH_CHECK_VALUE(
      size > 0, file.path(), ": expected ", expected, ", found an empty file. Fetch it again with ",
      format.script, ".");
  const bool whole = size % record == 0;
  // The two record lengths have no common divisor, so only a file of at least 3074 records can be
  // whole as both.
  const CifarFormat& other = other_than(format);
  TORCH_CHECK_VALUE(
      whole || size % other.record_bytes() != 0, file.path(), ": expected ", expected, ", found ",
      size, " bytes: ", size / other.record_bytes(), " records of ", other.name, " (",
      other.record_bytes(), " bytes: ", other.record, "). Read it as that, or fetch ", format.name,
      " with ", format.script, ".");
  TORCH_CHECK_VALUE(
      whole, file.path(), ": expected ", expected, ", found ", size, " bytes: ", size / record,
      " records and ", size % record, " bytes more. The file is cut short or too long: fetch it ",
      "again with ", format.script, ".");
  return file.read_tensor({size / record, record});
}

/// \param label  index of the format's label to return.
LabeledImages read_cifar(
    const CifarFormat& format, const std::string& folder, const std::string& split, size_t label) {
  std::vector<at::Tensor> images;
  std::vector<at::Tensor> labels;
  for (const auto& name : files_of(format, split)) {
    DataFile file(
        folder + "/" + name, c10::str("a file of ", format.name),
        missing_cifar_remedy(format, folder, name));
    const at::Tensor records = read_records(file, format);
    for (size_t i = 0; i < format.labels.size(); ++i) {
      const at::Tensor values = records.select(1, static_cast<int64_t>(i)).to(at::kLong);
      check_labels(
          values, format.labels[i].classes, file.path(), format.labels[i].kind,
          c10::str(
              " The file is damaged or not of ", format.name, ": fetch it again with ",
              format.script, "."));
      if (i == label) labels.push_back(values);
    }
    const auto first_pixel = static_cast<int64_t>(format.labels.size());
    images.push_back(records.slice(1, first_pixel).view({records.size(0), 3, 32, 32}));
  }
  return {at::cat(images), at::cat(labels)};
}

}  // namespace

LabeledImages read_cifar10(const std::string& folder, const std::string& split) {
  return read_cifar(kCifar10, folder, split, 0);
}

LabeledImages read_cifar100(
    const std::string& folder, const std::string& split, CifarLabels labels) {
  return read_cifar(kCifar100, folder, split, labels == CifarLabels::kCoarse ? 0 : 1);
}

}  // namespace examples
