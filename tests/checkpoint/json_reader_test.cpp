#include "checkpoint/files/json_reader.h"

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <ddp/internal/text.h>
#include <ddp/internal/utf8.h>

#include "support/catch.h"

using ddp::JsonReader;

namespace {

std::string text_in(const std::string& json) {
  JsonReader reader(json);
  auto text = reader.text();
  reader.expect_end();
  return text;
}

int64_t number_in(const std::string& json) {
  JsonReader reader(json);
  const auto number = reader.number();
  reader.expect_end();
  return number;
}

void skip(const std::string& json) {
  JsonReader reader(json);
  reader.skip_value();
  reader.expect_end();
}

}  // namespace

TEST_CASE("JSON strings", "[checkpoint][json][pure]") {
  CHECK(text_in(R"( "a\"\\\/\b\f\n\r\t" )") == "a\"\\/\b\f\n\r\t");
  CHECK(text_in(R"("\u0041\u00e9\u20AC\ud83c\udf89")") == "A\xC3\xA9\xE2\x82\xAC\xF0\x9F\x8E\x89");
  CHECK(text_in("\"\"").empty());
  std::string all;
  for (int c = 0; c < 128; ++c) all += static_cast<char>(c);
  CHECK(text_in(ddp::json_text(all)) == all);
  for (const auto* bad :
       {"", "a", "\"a", "\"\\", "\"\\x\"", "\"\\u12\"", "\"\\u12g4\"", "\"\\ud83c\"",
        "\"\\ud83c\\n\"", "\"\\ud83c\\u0041\"", "\"\\udf89\"", "\"\n\"", "\"a\" b"}) {
    CAPTURE(bad);
    CHECK_THROWS_AS(text_in(bad), std::invalid_argument);
  }
}

TEST_CASE("JSON numbers", "[checkpoint][json][pure]") {
  CHECK(number_in(" 0") == 0);
  CHECK(number_in("-12\n") == -12);
  CHECK(number_in("9223372036854775807") == std::numeric_limits<int64_t>::max());
  for (const auto* bad :
       {"", "-", "+1", "01", "-01", "1.0", "1e3", "1E3", "9223372036854775808", "0x1", "1 2"}) {
    CAPTURE(bad);
    CHECK_THROWS_AS(number_in(bad), std::invalid_argument);
  }
  CHECK(JsonReader("[ 1 ,\t2]").numbers() == std::vector<int64_t>{1, 2});
  CHECK(JsonReader("[]").numbers().empty());
  CHECK_THROWS_AS(JsonReader("[1,]").numbers(), std::invalid_argument);
}

TEST_CASE("JSON numbers that are no integers", "[checkpoint][json][pure]") {
  const auto real_in = [](const std::string& json) {
    JsonReader reader(json);
    const auto number = reader.real();
    reader.expect_end();
    return number;
  };
  CHECK(real_in(" -0.5e-1 ") == -0.05);
  CHECK(real_in("3") == 3);
  for (const char* bad : {"", "x", "nan", "inf", "1e999", "0x1p3", "1.2.3", "\"1\""}) {
    CAPTURE(bad);
    CHECK_THROWS_AS(real_in(bad), std::invalid_argument);
  }
}

TEST_CASE("JSON values of no interest", "[checkpoint][json][pure]") {
  skip(R"({"a": [1, -2.5e+3, true, null, "x]"], "b": {}})");
  for (const auto* bad : {"", "]", "{\"a\"}", "{\"a\":}", "[1", "{1:2}", "\"", "1 2"}) {
    CAPTURE(bad);
    CHECK_THROWS_AS(skip(bad), std::invalid_argument);
  }
  skip(std::string(60, '[') + std::string(60, ']'));
  CHECK_THROWS_AS(skip(std::string(1000000, '[')), std::invalid_argument);
  CHECK_THROWS_WITH(skip("[1;"), "expected ] at byte 2 of JSON, got \";\"");
}

TEST_CASE("UTF-8", "[checkpoint][json][pure]") {
  CHECK(ddp::is_utf8("a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x8E\x89\xF4\x8F\xBF\xBF"));
  for (const auto* bad :
       {"\x80", "\xC3", "\xC0\x80", "\xC1\xBF", "\xE0\x80\x80", "\xED\xA0\x80", "\xF0\x80\x80\x80",
        "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xE2\x82", "\xC3(", "\xFF"}) {
    CAPTURE(bad);
    CHECK_FALSE(ddp::is_utf8(bad));
  }
}
