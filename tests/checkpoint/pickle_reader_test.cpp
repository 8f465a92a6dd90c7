// Pickles that no torch.save writes are errors, in little time and memory.
#include <string>

#include "checkpoint/python/pickle_reader.h"
#include "support/error_of.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;

c10::IValue read(const std::string& operations) {
  return ddp::read_pickle(
      "\x80\x02" + operations + ".", [](const std::string&) { return c10::Storage(); });
}

std::string error_in(const std::string& operations) {
  return error_of([&] { read(operations); });
}

std::string repeated(const std::string& operations, size_t times) {
  std::string all;
  for (size_t i = 0; i < times; ++i) all += operations;
  return all;
}

// A tuple in a tuple, and a list in a list.
std::string nested_tuples(size_t depth) { return ")" + std::string(depth - 1, '\x85'); }
std::string nested_lists(size_t depth) {
  return std::string(depth, ']') + std::string(depth - 1, 'a');
}

}  // namespace

TEST_CASE("a pickle may be nested a hundred deep", "[checkpoint][errors][pure]") {
  CHECK(read(nested_tuples(100)).isTuple());
  CHECK(read(nested_lists(100)).isList());
  CHECK(read(repeated("}K\x01", 99) + "}" + std::string(99, 's')).isGenericDict());
  for (const size_t depth : {size_t{101}, size_t{300000}}) {
    CAPTURE(depth);
    CHECK_THAT(error_in(nested_tuples(depth)), ContainsText("nested more than 100 deep"));
    CHECK_THAT(error_in(nested_lists(depth)), ContainsText("nested more than 100 deep"));
  }
}

TEST_CASE("Python's integers of any length keep their sign", "[checkpoint][pure]") {
  CHECK(read(std::string("\x8a\x05\xff\xff\xff\x7f\xff", 7)).toInt() == -2147483649);
  CHECK(read(std::string("\x8a\x05\x00\x00\x00\x80\x00", 7)).toInt() == 2147483648);
  CHECK(read(std::string("\x8a\x00", 2)).toInt() == 0);
}

TEST_CASE("nothing in a pickle contains itself", "[checkpoint][errors][pure]") {
  const std::string text = "a container changes that another holds";
  const std::string keep("q\0", 2);
  const std::string take("h\0", 2);
  CHECK_THAT(error_in("]" + keep + take + "a"), ContainsText(text));
  CHECK_THAT(error_in("}" + keep + "K\x01" + take + "s"), ContainsText(text));
  // In a tuple that the container then takes.
  CHECK_THAT(error_in("]" + keep + take + "\x85" + "a"), ContainsText(text));
  // A container that two others hold does not contain itself.
  CHECK(read("](]" + keep + take + "e").toListRef().size() == 2);
}

TEST_CASE("a tuple that many containers hold is made once", "[checkpoint][errors][pure]") {
  // Forty pairs, each of which holds the previous pair twice: 2^40 elements if they were copied.
  std::string pairs = ")";
  for (char i = 0; i < 40; ++i) pairs += std::string("q") + i + "h" + i + "\x86";
  const auto value = read(pairs);
  const auto& both = value.toTupleRef().elements();
  CHECK(both[0].is(both[1]));
}
