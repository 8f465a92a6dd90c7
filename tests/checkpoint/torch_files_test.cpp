// Files of torch.save that others wrote, and how files get their names.
#include <fstream>
#include <functional>
#include <string>
#include <string_view>

#include <caffe2/serialize/inline_container.h>
#include <ddp/internal/file_io.h>
#include <ddp/state_dict.h>
#include <torch/torch.h>

#include "checkpoint/tensors/tensor_file.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

/// Writes the records of a file of torch.save again, some of them compressed.
void write_again(
    const std::string& from, const std::string& to,
    const std::function<bool(const std::string&)>& compresses) {
  caffe2::serialize::PyTorchStreamReader reader(from);
  std::ofstream file(to, std::ios::binary);
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
    file.write(static_cast<const char*>(data), static_cast<std::streamsize>(size));
    return size;
  });
  for (const auto& name : reader.getAllRecords()) {
    const bool is_writers_own = name == "version" || name.rfind(".data", 0) == 0;
    if (is_writers_own) continue;
    const auto [data, size] = reader.getRecord(name);
    writer.writeRecord(name, data.get(), size, compresses(name));
  }
  writer.writeEndOfFile();
}

void write_text(ddp::OutputFile& file, std::string_view text) {
  file.write(text.data(), text.size());
}

}  // namespace

TEST_CASE("compressed records of tensors are refused by name", "[checkpoint][errors][pure]") {
  const TemporaryFolder folder;
  torch::OrderedDict<std::string, at::Tensor> dict;
  dict.insert("a", torch::ones({1000}));
  dict.insert("b", torch::arange(1000));
  ddp::save_state_dict(dict, folder.file("a.pt"));
  const auto path = folder.file("b.pt");
  const auto error_of_file = [&] { return error_of([&] { ddp::open_tensor_file(path); }); };
  write_again(folder.file("a.pt"), path, [](const std::string&) { return false; });
  CHECK(error_of_file().empty());
  CHECK(torch::equal(ddp::open_tensor_file(path)->read(1), dict["b"]));
  // The names and shapes are read whole.
  write_again(
      folder.file("a.pt"), path, [](const std::string& name) { return name == "data.pkl"; });
  CHECK(torch::equal(ddp::open_tensor_file(path)->read(1), dict["b"]));
  write_again(folder.file("a.pt"), path, [](const std::string& name) { return name == "data/1"; });
  CHECK_THAT(
      error_of_file(),
      ContainsText(path) && ContainsText("records that are not compressed, got data/1 compressed. "
                                         "Save the file again by torch.save"));
}

TEST_CASE("a file that is not there is named, of each kind", "[checkpoint][errors][pure]") {
  const TemporaryFolder folder;
  for (const char* name : {"a.pt", "a.safetensors", "a.json"}) {
    const auto path = folder.file(name);
    CHECK_THAT(
        error_of([&] { ddp::open_tensor_file(path); }),
        ContainsText(path + ": expected to ") &&
            ContainsText("it, got \"No such file or directory\""));
  }
}

TEST_CASE("a file that is written twice at once is one of the two", "[checkpoint][pure]") {
  const TemporaryFolder folder;
  const auto path = folder.file("a");
  ddp::replace_file(path, [&](ddp::OutputFile& outer) {
    write_text(outer, "the first, ");
    ddp::replace_file(path, [](ddp::OutputFile& inner) { write_text(inner, "the second"); });
    CHECK(read_bytes(path) == "the second");
    write_text(outer, "to its end");
  });
  CHECK(read_bytes(path) == "the first, to its end");
  CHECK(names_in(folder.path()).size() == 1);
  CHECK(ddp::unique_suffix() != ddp::unique_suffix());
}
