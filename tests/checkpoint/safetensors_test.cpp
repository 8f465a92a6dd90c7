// Files of safetensors: written, read, and refused.
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include <ddp/safetensors.h>
#include <ddp/state_dict.h>
#include <torch/torch.h>

#include "checkpoint/tensors/tensor_file.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

using Dict = torch::OrderedDict<std::string, at::Tensor>;

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string with_length(const std::string& header) {
  const uint64_t length = header.size();
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + header;
}

// Elements as bytes: NaN of float8 equals itself.
bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const auto x = a.contiguous(), y = b.contiguous();
  return x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

// A tensor of every dtype, of several shapes.
Dict all_dtypes() {
  Dict dict;
  const auto bytes = torch::arange(96, torch::kByte);
  for (const auto dtype :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
        at::kChar, at::kByte, at::kUInt64, at::kUInt32, at::kUInt16, at::kComplexFloat,
        at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz,
        at::kFloat8_e8m0fnu}) {
    dict.insert(c10::toString(dtype), bytes.view(dtype).view({2, 3, -1}));
  }
  dict.insert("bool", torch::tensor({true, false, true}));
  dict.insert("scalar", torch::tensor(2.5));
  dict.insert("none", torch::empty({2, 0, 3}));
  dict.insert("transposed", torch::arange(6.0).view({2, 3}).t());
  dict.insert("view", torch::arange(100).narrow(0, 7, 3));
  dict.insert("\"name\"\n\\ \xC3\xA9 \xF0\x9F\x8E\x89", torch::ones({1}));
  return dict;
}

const std::string kOne = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
const std::string kEight(8, '\1');

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("safetensors keep every dtype and shape", "[checkpoint][safetensors][pure]") {
  const TemporaryFolder folder;
  const auto path = folder.file("all.safetensors");
  const auto saved = all_dtypes();
  ddp::save_safetensors(saved, path, {{"format", "pt"}, {"a \"b\"", "\xC3\xA9"}});
  const auto loaded = ddp::load_safetensors(path);
  CHECK(loaded.size() == saved.size());
  for (const auto& item : saved) {
    CAPTURE(item.key());
    REQUIRE(loaded.contains(item.key()));
    CHECK(same_bytes(loaded[item.key()], item.value()));
  }
  const std::map<std::string, std::string> metadata{{"format", "pt"}, {"a \"b\"", "\xC3\xA9"}};
  CHECK(ddp::safetensors_metadata(path) == metadata);
  CHECK(names_in(folder.path()).size() == 1);
}

TEST_CASE("a file of safetensors is written byte by byte", "[checkpoint][safetensors][pure]") {
  const TemporaryFolder folder;
  Dict dict;
  dict.insert("byte", torch::tensor({7, 8}, torch::kByte));
  dict.insert("w", torch::tensor({1.0F}));
  ddp::save_safetensors(dict, folder.file("a"), {{"k", "v"}});
  std::string header =
      R"({"__metadata__":{"k":"v"},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
      R"("byte":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  CHECK(read_bytes(folder.file("a")) == with_length(header) + std::string("\0\0\x80\x3f\7\x8", 6));
}

TEST_CASE("safetensors that break a rule are refused", "[checkpoint][safetensors][errors][pure]") {
  const TemporaryFolder folder;
  const auto path = folder.file("bad.safetensors");
  const auto expect = [&](const std::string& bytes, const std::vector<std::string>& texts) {
    write_file(path, bytes);
    const auto error = error_of([&] { ddp::load_safetensors(path); });
    CAPTURE(error);
    CHECK(error.find(path + ": ") == 0);
    for (const auto& text : texts) CHECK_THAT(error, ContainsText(text));
  };
  const auto with_header = [&](const std::string& from, const std::string& to) {
    return with_length(replaced(kOne, from, to)) + kEight;
  };
  write_file(path, with_length(kOne) + kEight);
  CHECK(ddp::load_safetensors(path)["w"].sizes() == at::IntArrayRef({2}));

  expect("", {"expected a file of safetensors", "got 0 bytes"});
  expect(std::string(8, '\xFF') + kOne, {"at most 100000000 bytes", "got 18446744073709551615"});
  expect(with_length(kOne).substr(0, 30), {"bytes of a header", "got 22"});
  expect(with_length(" " + kOne) + kEight, {"begins with {"});
  expect(with_length(kOne + "x") + kEight, {"expected the end at byte"});
  expect(with_header("\"w\"", "\"\xFF\""), {"UTF-8"});
  expect(with_header("[2]", "[2"), {"expected an integer of 64 bits at byte"});
  expect(with_header("[2]", "[3]"), {"\"w\"", "the bytes of [3] F32, 12", "got [0, 8]"});
  expect(with_header("[2]", "[-2]"), {"\"w\"", "numbers >= 0", "got [-2]"});
  expect(with_header("[2]", "[2.0]"), {"expected an integer at byte"});
  expect(with_header("[2]", "[9223372036854775807,4]"), {"\"w\"", "more than 2^63"});
  expect(with_header("[0,8]", "[0,9]"), {"\"w\"", "within 8 bytes", "got [0, 9]"});
  expect(with_header("[0,8]", "[8,0]"), {"\"w\"", "[begin, end]", "got [8, 0]"});
  expect(with_header("[0,8]", "[0]"), {"\"w\"", "got [0]"});
  expect(with_header("F32", "F33"), {"\"w\"", "a dtype that LibTorch has", "got \"F33\""});
  expect(with_header(",\"shape\":[2]", ""), {"\"w\"", "dtype, shape and data_offsets", "fewer"});
  expect(
      with_header("\"shape\":[2]", "\"shape\":[2],\"shape\":[2]"),
      {"\"w\"", "once each", "\"shape\""});
  expect(with_header("}}", ",\"more\":1}}"), {"\"w\"", "once each"});
  expect(with_header("}}", "},\"w\":{}}"), {"\"w\"", "one entry of a name", "two"});
  expect(with_length(kOne) + kEight + "x", {"expected 8 bytes of tensors", "got 9"});
  expect(with_length("{}") + "x", {"expected 0 bytes of tensors", "got 1"});
  const std::string two =
      R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],)";
  expect(with_length(two + R"("data_offsets":[3,7]}})") + kEight, {"\"b\"", "begin at 4", "got 3"});
  expect(with_length(two + R"("data_offsets":[4,8]}})") + kEight + "x", {"got 9"});
  write_file(path, with_length(two + R"("data_offsets":[4,8]}})") + kEight);
  CHECK(ddp::load_safetensors(path).size() == 2);
  expect(with_length(two + R"("data_offsets":[5,8]}})") + kEight, {"span the bytes of [4] U8, 4"});
  expect(
      with_length(R"({"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})") + kEight,
      {"\"b\"", "begin at 0", "got 4"});
  expect(
      with_length(R"({"__metadata__":{"a":"b","a":"c"}})"), {"__metadata__", "each key once", "a"});
  expect(with_length(R"({"__metadata__":{"a":1}})"), {"expected \" at byte"});
  CHECK_THAT(
      error_of([&] { ddp::load_safetensors(folder.file("none")); }), ContainsText("No such file"));
}

TEST_CASE("bytes that are no bool of C++ become one", "[checkpoint][safetensors][pure]") {
  const TemporaryFolder folder;
  write_file(
      folder.file("a"), with_length(R"({"b":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}})") +
                            std::string("\0\1\2", 3));
  const auto bits = ddp::load_safetensors(folder.file("a"))["b"].view(torch::kByte);
  CHECK(torch::equal(bits, torch::tensor({0, 1, 1}, torch::kByte)));
}

TEST_CASE("safetensors cannot be written of all", "[checkpoint][safetensors][errors][pure]") {
  const TemporaryFolder folder;
  const auto save = [&](const std::string& name, const at::Tensor& tensor) {
    Dict dict;
    dict.insert(name, tensor);
    return error_of<c10::ValueError>([&] { ddp::save_safetensors(dict, folder.file("a")); });
  };
  CHECK_THAT(
      save("w", torch::ones({2}, torch::kComplexDouble)), ContainsText("ComplexDouble for \"w\""));
  CHECK_THAT(save("\xFF", torch::ones({2})), ContainsText("UTF-8"));
  CHECK_THAT(save("__metadata__", torch::ones({2})), ContainsText("__metadata__"));
  CHECK_THAT(
      save("w", torch::eye(2).to_sparse()),
      ContainsText("dense tensors, got another one under \"w\""));
  CHECK_THAT(save("w", {}), ContainsText("an undefined one under \"w\""));
  CHECK(names_in(folder.path()).empty());
}

TEST_CASE("an index of safetensors loads by name", "[checkpoint][safetensors][pure]") {
  const TemporaryFolder folder;
  const auto write = [&](const std::string& file, const std::vector<std::string>& names) {
    Dict dict;
    for (const auto& name : names) dict.insert(name, torch::full({2, 3}, double(name[0])));
    ddp::save_safetensors(dict, folder.file(file));
  };
  write("m-1.safetensors", {"a", "b"});
  write("m-2.safetensors", {"c"});
  const auto index = folder.file("m.safetensors.index.json");
  const auto load = [&](const std::string& map) {
    write_file(
        index,
        R"({"metadata": {"total_size": 7.5e1, "x": [null, {}]}, "weight_map": )" + map + "}\n");
    return ddp::load_safetensors(index);
  };
  const auto error = [&](const std::string& map) {
    const auto text = error_of([&] { load(map); });
    CHECK(text.find(index) == 0);
    return text;
  };
  const auto loaded = load(R"({"c": "m-2.safetensors", "a": "m-1.safetensors"})");
  CHECK(loaded.keys() == std::vector<std::string>{"c", "a"});
  CHECK(torch::equal(loaded["a"], torch::full({2, 3}, 97.0)));
  CHECK(torch::equal(loaded["c"], torch::full({2, 3}, 99.0)));
  CHECK_THAT(
      error(R"({"c": "m-1.safetensors"})"),
      ContainsText("expected \"c\" in m-1.safetensors, as weight_map has it, got none"));
  CHECK_THAT(error(R"({"c": "../m-2.safetensors"})"), ContainsText("files beside the index"));
  CHECK_THAT(
      error(R"({"c": "m-2.safetensors", "c": "m-2.safetensors"})"), ContainsText("\"c\" twice"));
  CHECK_THAT(error("{}, \"weight_map\": 3 4"), ContainsText("expected } at byte"));
  write_file(index, "{}");
  CHECK_THAT(error_of([&] { ddp::load_safetensors(index); }), ContainsText("\"weight_map\""));
}

TEST_CASE("boxes of a file's tensors are read alone", "[checkpoint][safetensors][pure]") {
  const TemporaryFolder folder;
  Dict dict;
  dict.insert("w", torch::arange(60.0, torch::kDouble).view({3, 4, 5}));
  dict.insert("t", torch::arange(12, torch::kInt).view({3, 4}).t());
  dict.insert("s", torch::tensor(3));
  ddp::save_safetensors(dict, folder.file("a.safetensors"));
  ddp::save_state_dict(dict, folder.file("a.pt"));
  // Strides of Python's files stay: transposed elements are not row by row.
  torch::nn::Module strided;
  for (const auto& item : dict) strided.register_buffer(item.key(), item.value());
  ddp::save_state_dict(strided, folder.file("strided.pt"));
  const auto name = GENERATE(as<std::string>(), "a.safetensors", "a.pt", "strided.pt");
  CAPTURE(name);
  const auto file = ddp::open_tensor_file(folder.file(name));
  REQUIRE(file->tensors().size() == 3);
  for (size_t i = 0; i < 3; ++i) {
    const auto& [key, kind] = file->tensors()[i];
    CHECK(same_bytes(file->read(i), dict[key].contiguous()));
    if (key == "w") {
      const auto box = file->read(i, {{1, 0, 2}, {2, 3, 2}});
      CHECK(torch::equal(box, dict["w"].narrow(0, 1, 2).narrow(1, 0, 3).narrow(2, 2, 2)));
      CHECK(file->read(i, {{0, 0, 0}, {3, 0, 5}}).sizes() == at::IntArrayRef({3, 0, 5}));
    } else if (key == "t") {
      CHECK(
          torch::equal(file->read(i, {{1, 1}, {2, 2}}), dict["t"].narrow(0, 1, 2).narrow(1, 1, 2)));
    }
  }
}

TEST_CASE(
    "a file that is shortened while it is read is an error",
    "[checkpoint][safetensors][errors][pure]") {
  constexpr int64_t kCount = 50000;  // elements over many pages
  const TemporaryFolder folder;
  Dict dict;
  dict.insert("front", torch::ones({kCount}));
  dict.insert("end", torch::ones({kCount}));
  const auto path = folder.file(GENERATE(as<std::string>(), "a.safetensors", "a.pt"));
  if (ddp::is_safetensors(path)) {
    ddp::save_safetensors(dict, path);
  } else {
    ddp::save_state_dict(dict, path);
  }
  const auto file = ddp::open_tensor_file(path);
  // Near the end: the rest of the last page would read as zeros. Before: there is no page.
  const auto bytes = static_cast<off_t>(read_bytes(path).size());
  const auto less = GENERATE_COPY(as<off_t>(), off_t{100}, off_t{200000}, bytes);
  CAPTURE(path, less);
  REQUIRE(truncate(path.c_str(), bytes - less) == 0);
  // Files of torch.save have a directory after the elements.
  const bool has_all = !ddp::is_safetensors(path) && less == 100;
  const auto error = error_of<c10::Error>([&] { file->read(1); });
  CAPTURE(error);
  CHECK(error.empty() == has_all);
  CHECK((has_all || error.find(path + ": expected 200000 bytes") == 0));
  if (less < bytes) CHECK(torch::equal(file->read(0), dict["front"]));
}

TEST_CASE("a dictionary is saved as Python's state_dict", "[checkpoint][pure]") {
  const TemporaryFolder folder;
  Dict dict;
  const auto shared = torch::arange(1000.0);
  dict.insert("0.weight", shared.view({250, 4}).narrow(0, 0, 2).requires_grad_(true));
  dict.insert("0.bias", torch::ones({2}));
  dict.insert("tied", dict["0.bias"]);
  ddp::save_state_dict(dict, folder.file("a.pt"));
  CHECK(read_bytes(folder.file("a.pt")).size() < 2000);
  const auto file = ddp::open_tensor_file(folder.file("a.pt"));
  CHECK(file->tensors().size() == 3);
  CHECK(torch::equal(file->read(0), dict["0.weight"]));
  dict.insert("large", torch::zeros({1000}));
  dict.insert("again", dict["large"]);
  ddp::save_state_dict(dict, folder.file("a.pt"));
  CHECK(read_bytes(folder.file("a.pt")).size() < 7000);
  dict.insert("sparse", torch::eye(2).to_sparse());
  CHECK_THAT(
      error_of<c10::ValueError>([&] { ddp::save_state_dict(dict, folder.file("a.pt")); }),
      ContainsText("\"sparse\""));
}
