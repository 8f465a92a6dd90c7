#include "python/pickle_reader.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/ScalarType.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

#include "python/torch_file.h"

namespace ddp {
namespace {

constexpr const char* kDamagedPickle = "expected a whole pickle, got one that is damaged: ";

// More levels than any state_dict() has. Deeper nesting would overflow the stack when it is freed.
constexpr int kMaxDepth = 100;

#define DDP_CHECK_PICKLE(condition, ...) \
  DDP_CHECK(condition, kDamagedPickle, __VA_ARGS__, ". Load another file.")

/// An item on the stack of a pickle. A tuple may hold items that are no values: the arguments of a
/// function.
struct PickleItem {
  enum class Kind { Mark, Value, Tuple, Global, Storage };
  Kind kind = Kind::Mark;
  c10::IValue value;                               // also set for a tuple that holds only values
  std::shared_ptr<std::vector<PickleItem>> items;  // Tuple
  int depth = 0;                                   // Tuple: 1 where it holds only plain values
  std::string name;                                // Global: "torch.FloatStorage"
  c10::Storage storage;
  std::optional<at::ScalarType> dtype;  // Storage: of its elements; none: bytes
};

PickleItem make_value(c10::IValue value) {
  PickleItem item;
  item.kind = PickleItem::Kind::Value;
  item.value = std::move(value);
  return item;
}

c10::IValue as_value(const PickleItem& item) {
  const bool is_tuple = item.kind == PickleItem::Kind::Tuple;
  // Throws at the first element that is no value, and names it.
  if (is_tuple && item.value.isNone())
    std::for_each(item.items->begin(), item.items->end(), as_value);
  DDP_CHECK(
      is_tuple || item.kind == PickleItem::Kind::Value,
      "expected tensors, numbers, strings, lists and dictionaries, got ",
      item.name.empty() ? "something else" : item.name, ". Save a state_dict().");
  return item.value;
}

at::ScalarType find_dtype(const std::string& name, bool by_storage) {
  for (int8_t i = 0; i < static_cast<int8_t>(at::ScalarType::NumOptions); ++i) {
    const auto type = static_cast<at::ScalarType>(i);
    if (type == at::ScalarType::Undefined || at::isQIntType(type)) continue;
    const auto known = by_storage ? ddp::str("torch.", c10::toString(type), "Storage")
                                  : ddp::str("torch.", c10::getDtypeNames(type).first);
    if (known == name) return type;
  }
  DDP_CHECK(false, "expected the name of a dtype, got ", name, ". Save another dtype.");
  return at::ScalarType::Undefined;
}

int64_t as_int(const PickleItem& item) {
  const auto value = as_value(item);
  DDP_CHECK_PICKLE(value.isInt(), "an integer is missing");
  return value.toInt();
}

std::vector<int64_t> as_sizes(const PickleItem& item) {
  DDP_CHECK_PICKLE(item.kind == PickleItem::Kind::Tuple, "a shape is missing");
  std::vector<int64_t> sizes;
  for (const auto& element : *item.items) sizes.push_back(as_int(element));
  return sizes;
}

// Whether the elements of such a view lie within a storage of `capacity` elements.
bool fits(
    int64_t capacity, int64_t offset, const std::vector<int64_t>& sizes,
    const std::vector<int64_t>& strides) {
  if (offset < 0 || sizes.size() != strides.size()) return false;
  int64_t elements = 1;
  int64_t last = offset;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] < 0 || strides[d] < 0) return false;
    if (__builtin_mul_overflow(elements, sizes[d], &elements)) return false;
    int64_t reach = 0;
    if (__builtin_mul_overflow(std::max<int64_t>(sizes[d] - 1, 0), strides[d], &reach))
      return false;
    if (__builtin_add_overflow(last, reach, &last)) return false;
  }
  return elements == 0 ? offset <= capacity : last < capacity;
}

// Reads torch._utils._rebuild_tensor_v2(storage, offset, size, stride, ...), or v3, which has the
// dtype as an argument, and none in the storage.
at::Tensor rebuild_tensor(const std::vector<PickleItem>& arguments, bool is_v3) {
  DDP_CHECK_PICKLE(
      arguments.size() >= (is_v3 ? 7 : 6) && arguments[0].kind == PickleItem::Kind::Storage,
      "a tensor lacks its storage");
  // Python writes {"conj": true} or {"neg": true} for a view whose memory is not its values.
  const size_t metadata = is_v3 ? 7 : 6;
  const bool has_metadata = arguments.size() > metadata &&
                            arguments[metadata].value.isGenericDict() &&
                            !arguments[metadata].value.toGenericDict().empty();
  DDP_CHECK_PICKLE(
      !has_metadata,
      "a tensor is a conjugate or negative view: save its resolve_conj() or resolve_neg()");
  const auto& storage = arguments[0].storage;
  const auto dtype = is_v3 ? find_dtype(arguments[6].name, /*by_storage=*/false)
                           : arguments[0].dtype.value_or(at::kByte);
  const auto offset = as_int(arguments[1]);
  const auto sizes = as_sizes(arguments[2]);
  const auto strides = as_sizes(arguments[3]);
  const auto capacity = storage.nbytes() / c10::elementSize(dtype);
  DDP_CHECK_PICKLE(
      fits(static_cast<int64_t>(capacity), offset, sizes, strides),
      "a tensor goes beyond its storage");
  return at::empty({0}, dtype).set_(storage, offset, sizes, strides);
}

/// Runs a pickle, which is a program for a stack machine, of protocol 2 as torch.save writes it.
class PickleMachine {
 public:
  PickleMachine(const std::string& pickle, const FindStorage& find_storage)
      : pickle_(pickle), find_storage_(find_storage) {}

  c10::IValue run() {
    char code = 0;
    while ((code = read<char>()) != '.') {
      if (!push_constant(code) && !push_from_memo(code) && !build_container(code))
        build_object(code);
    }
    DDP_CHECK_PICKLE(stack_.size() == 1, "it ends early");
    return as_value(stack_.back());
  }

 private:
  using Kind = PickleItem::Kind;

  bool push_constant(char code) {
    switch (code) {
      case '\x80':
        DDP_CHECK(
            read<uint8_t>() == 2,
            "expected a pickle of protocol 2, torch.save's default, got another. Save it with "
            "that.");
        return true;
      case 'N':
        return push(make_value(c10::IValue()));
      case '\x88':
      case '\x89':
        return push(make_value(code == '\x88'));
      case 'J':
        return push(make_value(static_cast<int64_t>(read<int32_t>())));
      case 'K':
        return push(make_value(static_cast<int64_t>(read<uint8_t>())));
      case 'M':
        return push(make_value(static_cast<int64_t>(read<uint16_t>())));
      case '\x8a':
        return push(make_value(read_long()));
      case 'G':
        return push(make_value(read_big_endian_double()));
      case 'X':
        return push(make_value(read_text(read<uint32_t>())));
      case 'c':
        return push(read_global());
      default:
        return false;
    }
  }

  bool push_from_memo(char code) {
    switch (code) {
      case 'q':
        memo_[read<uint8_t>()] = top();
        return true;
      case 'r':
        memo_[read<uint32_t>()] = top();
        return true;
      case 'h':
        return push(remembered(read<uint8_t>()));
      case 'j':
        return push(remembered(read<uint32_t>()));
      default:
        return false;
    }
  }

  bool build_container(char code) {
    switch (code) {
      case '(':
        return push({});
      case ')':
        return push(make_tuple_item({}));
      case 't':
        return push(make_tuple_item(pop_to_mark()));
      case '\x85':
      case '\x86':
      case '\x87':
        return push(make_tuple_item(pop_last(static_cast<unsigned char>(code) - 0x84)));
      case ']':
        return push(make_container(make_list()));
      case '}':
        return push(make_container(make_dict()));
      case 'a':
        return append(pop_last(1));
      case 'e':
        return append(pop_to_mark());
      case 's':
        return set_items(pop_last(2));
      case 'u':
        return set_items(pop_to_mark());
      default:
        return false;
    }
  }

  void build_object(char code) {
    switch (code) {
      case 'Q':
        push(find_persistent(pop_last(1).front()));
        return;
      case 'R':
      case '\x81': {
        const auto call = pop_last(2);
        push(reduce(call[0], call[1]));
        return;
      }
      case 'b':
        // The attributes of an object; only OrderedDict has one here, `_metadata`.
        pop_last(1);
        DDP_CHECK_PICKLE(as_value(top()).isGenericDict(), "attributes belong to no dictionary");
        return;
      default:
        DDP_CHECK_PICKLE(
            false, "it has the unknown operation ", static_cast<int>(static_cast<uint8_t>(code)));
    }
  }

  template <typename T>
  T read() {
    T value;
    DDP_CHECK_PICKLE(pickle_.size() - position_ >= sizeof value, "it ends early");
    std::memcpy(&value, pickle_.data() + position_, sizeof value);
    position_ += sizeof value;
    return value;
  }

  std::string read_text(size_t size) {
    DDP_CHECK_PICKLE(pickle_.size() - position_ >= size, "it ends early");
    position_ += size;
    return pickle_.substr(position_ - size, size);
  }

  std::string read_line() {
    const auto end = pickle_.find('\n', position_);
    DDP_CHECK_PICKLE(end != std::string::npos, "it ends early");
    auto line = pickle_.substr(position_, end - position_);
    position_ = end + 1;
    return line;
  }

  int64_t read_long() {
    const auto bytes = read_text(read<uint8_t>());
    DDP_CHECK(
        bytes.size() <= sizeof(int64_t),
        "expected integers of 64 bits, got a longer one. Save it as text.");
    // The last byte has the sign. A char has none on aarch64.
    int64_t number = !bytes.empty() && static_cast<signed char>(bytes.back()) < 0 ? -1 : 0;
    std::memcpy(&number, bytes.data(), bytes.size());
    return number;
  }

  double read_big_endian_double() {
    const auto bits = __builtin_bswap64(read<uint64_t>());
    double number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
  }

  PickleItem read_global() {
    PickleItem item;
    item.kind = Kind::Global;
    const auto module = read_line();
    item.name = module + "." + read_line();
    return item;
  }

  bool push(PickleItem item) {
    stack_.push_back(std::move(item));
    return true;
  }

  PickleItem& top() {
    DDP_CHECK_PICKLE(!stack_.empty(), "a value is missing");
    return stack_.back();
  }

  std::vector<PickleItem> pop_last(size_t count) {
    DDP_CHECK_PICKLE(stack_.size() >= count, "a value is missing");
    const auto first = stack_.end() - static_cast<std::ptrdiff_t>(count);
    std::vector<PickleItem> items(first, stack_.end());
    stack_.erase(first, stack_.end());
    return items;
  }

  std::vector<PickleItem> pop_to_mark() {
    size_t count = 0;
    while (count < stack_.size() && stack_[stack_.size() - 1 - count].kind != Kind::Mark) ++count;
    auto items = pop_last(count);
    DDP_CHECK_PICKLE(!stack_.empty(), "a mark is missing");
    stack_.pop_back();
    return items;
  }

  PickleItem make_tuple_item(std::vector<PickleItem> items) {
    PickleItem item;
    item.kind = Kind::Tuple;
    item.depth = depth_around(items);
    const auto is_value = [](const PickleItem& element) {
      return element.kind == Kind::Value || element.value.isTuple();
    };
    if (std::all_of(items.begin(), items.end(), is_value)) {
      std::vector<c10::IValue> elements;
      for (const auto& element : items) elements.push_back(element.value);
      item.value = c10::ivalue::Tuple::create(std::move(elements));
    }
    item.items = std::make_shared<std::vector<PickleItem>>(std::move(items));
    return item;
  }

  PickleItem make_container(c10::IValue value) {
    containers_[value.internalToPointer()] = {};  // another container may have been at this address
    return make_value(std::move(value));
  }

  // Returns the depth of a container of these items, and marks the items as held: they may change
  // no more. This keeps the depth valid, and no container can come to hold itself.
  int depth_around(const std::vector<PickleItem>& items) {
    int deepest = 0;
    for (const auto& item : items) {
      int depth = item.depth;
      if (item.kind == Kind::Value && (item.value.isList() || item.value.isGenericDict())) {
        auto& container = containers_[item.value.internalToPointer()];
        container.is_held = true;
        depth = container.depth;
      }
      deepest = std::max(deepest, depth);
    }
    DDP_CHECK_PICKLE(deepest < kMaxDepth, "it is nested more than ", kMaxDepth, " deep");
    return deepest + 1;
  }

  void check_addition(const c10::IValue& target, const std::vector<PickleItem>& items) {
    const int depth = depth_around(items);
    auto& container = containers_[target.internalToPointer()];
    DDP_CHECK_PICKLE(!container.is_held, "a container changes that another holds");
    container.depth = std::max(container.depth, depth);
  }

  const PickleItem& remembered(uint32_t index) {
    const auto found = memo_.find(index);
    DDP_CHECK_PICKLE(found != memo_.end(), "it refers to what is not there");
    return found->second;
  }

  bool append(const std::vector<PickleItem>& items) {
    const auto target = as_value(top());
    DDP_CHECK_PICKLE(target.isList(), "a list is missing");
    check_addition(target, items);
    auto list = target.toList();
    for (const auto& item : items) list.push_back(as_value(item));
    return true;
  }

  bool set_items(const std::vector<PickleItem>& items) {
    const auto target = as_value(top());
    DDP_CHECK_PICKLE(target.isGenericDict() && items.size() % 2 == 0, "a dictionary is missing");
    check_addition(target, items);
    auto dict = target.toGenericDict();
    for (size_t i = 0; i < items.size(); i += 2) {
      const auto key = as_value(items[i]);
      DDP_CHECK(
          key.isString() || key.isInt(),
          "expected dictionaries with keys that are strings or integers, got another key. Save a "
          "state_dict().");
      dict.insert_or_assign(key, as_value(items[i + 1]));
    }
    return true;
  }

  // Reads ("storage", the storage's class, key, device, number of elements).
  PickleItem find_persistent(const PickleItem& id) {
    DDP_CHECK_PICKLE(
        id.kind == Kind::Tuple && id.items->size() == 5 && (*id.items)[1].kind == Kind::Global,
        "a storage has another form");
    const auto key = as_value((*id.items)[2]);
    DDP_CHECK_PICKLE(key.isString(), "a storage has no key");
    PickleItem item;
    item.kind = Kind::Storage;
    const auto& type = (*id.items)[1].name;
    if (type != "torch.storage.UntypedStorage" && type != "torch.UntypedStorage") {
      item.dtype = find_dtype(type, /*by_storage=*/true);
    }
    auto& storage = storages_[key.toStringRef()];
    if (!storage) storage = find_storage_(key.toStringRef());
    item.storage = storage;
    const auto element_size = item.dtype ? c10::elementSize(*item.dtype) : 1;
    const auto elements = as_int((*id.items)[4]);
    DDP_CHECK_PICKLE(
        elements >= 0 && static_cast<size_t>(elements) == storage.nbytes() / element_size,
        "a storage has another size");
    return item;
  }

  PickleItem reduce(const PickleItem& function, const PickleItem& arguments) {
    DDP_CHECK_PICKLE(
        function.kind == Kind::Global && arguments.kind == Kind::Tuple, "a call has another form");
    const auto& name = function.name;
    const auto& given = *arguments.items;
    if (name == "collections.OrderedDict" && given.empty()) return make_container(make_dict());
    if (name == "torch._utils._rebuild_tensor_v2") return make_value(rebuild_tensor(given, false));
    if (name == "torch._utils._rebuild_tensor_v3") return make_value(rebuild_tensor(given, true));
    if (name == "torch._utils._rebuild_parameter" && !given.empty()) return given.front();
    if (name == "torch.Size" && given.size() == 1) return given.front();
    DDP_CHECK(
        false, "expected tensors, numbers, strings, lists and dictionaries, got ", name,
        ". Save a state_dict().");
    return {};
  }

  /// A list or a dictionary.
  struct Container {
    int depth = 1;
    bool is_held = false;
  };

  const std::string& pickle_;
  const FindStorage& find_storage_;
  size_t position_ = 0;
  std::vector<PickleItem> stack_;
  std::unordered_map<uint32_t, PickleItem> memo_;
  std::unordered_map<const void*, Container> containers_;
  std::unordered_map<std::string, c10::Storage> storages_;
};

}  // namespace

c10::IValue read_pickle(const std::string& pickle, const FindStorage& find_storage) {
  return PickleMachine(pickle, find_storage).run();
}

}  // namespace ddp
