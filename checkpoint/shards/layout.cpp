#include "shards/layout.h"

#include <tuple>
#include <utility>

#include <ATen/core/functional.h>
#include <c10/util/ArrayRef.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <torch/csrc/jit/serialization/pickle.h>

namespace ddp {
namespace {

c10::IValue tuple_of(std::vector<c10::IValue> elements) {
  return c10::ivalue::Tuple::create(std::move(elements));
}

c10::IValue tuple_of_numbers(const std::vector<int64_t>& numbers) {
  return tuple_of({numbers.begin(), numbers.end()});
}

c10::IValue tuple_of_texts(const std::vector<std::string>& texts) {
  return tuple_of({texts.begin(), texts.end()});
}

std::vector<std::string> texts_in(const c10::IValue& tuple) {
  return c10::fmap(
      tuple.toTupleRef().elements(), [](const auto& element) { return element.toStringRef(); });
}

std::vector<int64_t> numbers_in(const c10::IValue& tuple) {
  return c10::fmap(
      tuple.toTupleRef().elements(), [](const auto& element) { return element.toInt(); });
}

std::string stage_text(std::optional<int64_t> stage) {
  return stage ? ddp::str("stage ", *stage) : "none";
}

}  // namespace

std::string kind_text(const TensorKind& kind) {
  return ddp::str(c10::IntArrayRef(kind.sizes), " ", kind.dtype);
}

std::vector<ShardLayout> shard_layouts_of(
    const std::string& part, const std::vector<ShardedTensor>& shards) {
  std::vector<ShardLayout> layouts;
  for (const auto& shard : shards) {
    const auto& local = shard.local;
    DDP_CHECK_VALUE(
        !shard.name.empty() && shard.replica >= 0 && local.defined(),
        "Checkpointer::add_sharded: expected shards with a name, a tensor and a replica >= 0 in "
        "part \"",
        part, "\", got ", local.defined() ? "another" : "an undefined tensor", " under \"",
        shard.name, "\" with replica ", shard.replica, ". Correct the callback.");
    DDP_CHECK_VALUE(
        local.layout() == at::kStrided && !local.is_quantized(),
        "Checkpointer: expected tensors with a dense storage, got a ", local.layout(),
        local.is_quantized() ? " quantized" : "", " one under \"", shard.name, "\" in part \"",
        part,
        "\". Correct the callback; sparse gradients make the state of an optimizer sparse: leave "
        "out momentum, or them.");
    const TensorBox box{shard.offset, local.sizes().vec()};
    DDP_CHECK_VALUE(
        is_within(box, shard.sizes), "Checkpointer::add_sharded: expected the shard of \"",
        shard.name, "\" in part \"", part, "\" to lie within ", c10::IntArrayRef(shard.sizes),
        ", got ", local.sizes(), " at ", c10::IntArrayRef(shard.offset), ". Correct the callback.");
    layouts.push_back(
        {shard.name, {local.scalar_type(), shard.sizes}, box, shard.replica, shard.stage});
  }
  return layouts;
}

void number_copies(std::vector<std::vector<ShardLayout>>& ranks) {
  using Place = std::tuple<std::string, std::vector<int64_t>, std::vector<int64_t>>;
  std::map<Place, int64_t> copies;
  for (auto& shards : ranks) {
    for (auto& shard : shards) {
      shard.replica = copies[{shard.name, shard.box.offset, shard.box.size}]++;
    }
  }
}

std::string to_text(const RankLayouts& layouts) {
  std::vector<c10::IValue> parts;
  for (const auto& [part, shards] : layouts) {
    std::vector<c10::IValue> entries;
    for (const auto& shard : shards) {
      entries.push_back(tuple_of(
          {shard.name, static_cast<int64_t>(shard.kind.dtype), tuple_of_numbers(shard.kind.sizes),
           tuple_of_numbers(shard.box.offset), tuple_of_numbers(shard.box.size), shard.replica,
           shard.stage ? c10::IValue(*shard.stage) : c10::IValue(),
           tuple_of_texts(shard.other_names)}));
    }
    parts.push_back(tuple_of({part, tuple_of(std::move(entries))}));
  }
  const auto bytes = torch::jit::pickle(tuple_of(std::move(parts)));
  return {bytes.begin(), bytes.end()};
}

RankLayouts layouts_from(const std::string& text) {
  RankLayouts layouts;
  const auto value = torch::jit::unpickle(text.data(), text.size());
  for (const auto& entry : value.toTupleRef().elements()) {
    const auto named = entry.toTupleRef().elements().vec();
    auto& shards = layouts[named[0].toStringRef()];
    for (const auto& item : named[1].toTupleRef().elements()) {
      const auto fields = item.toTupleRef().elements().vec();
      shards.push_back(
          {fields[0].toStringRef(),
           {static_cast<at::ScalarType>(fields[1].toInt()), numbers_in(fields[2])},
           {numbers_in(fields[3]), numbers_in(fields[4])},
           fields[5].toInt(),
           fields[6].toOptional<int64_t>(),
           texts_in(fields[7])});
    }
  }
  return layouts;
}

ShardTexts texts_of_part(const std::string& part) {
  return {"Checkpointer", ddp::str(" in part \"", part, '"')};
}

std::map<std::string, TensorKind> tensors_of(
    const ShardTexts& texts, const std::vector<std::vector<ShardLayout>>& ranks) {
  std::map<std::string, TensorKind> tensors;
  struct First {
    size_t rank;
    std::optional<int64_t> stage;
  };
  std::map<std::string, First> firsts;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& shard : ranks[rank]) {
      const auto& known = tensors.emplace(shard.name, shard.kind).first->second;
      const auto& [first, stage] =
          firsts.emplace(shard.name, First{rank, shard.stage}).first->second;
      DDP_CHECK_VALUE(
          stage == shard.stage, texts.subject, ": expected ", shard.name, texts.place,
          " in one stage of the pipeline, got it in ", stage_text(stage), " on rank ", first,
          " and in ", stage_text(shard.stage), " on rank ", rank, " of ", ranks.size(),
          ". Name the modules of stages by their place in the model, or declare a TiedParameter.");
      DDP_CHECK_VALUE(
          known.dtype == shard.kind.dtype && known.sizes == shard.kind.sizes, texts.subject,
          ": expected ", shard.name, texts.place, " to have one shape and dtype, got ",
          kind_text(known), " on rank ", first, " and ", kind_text(shard.kind), " on rank ", rank,
          " of ", ranks.size(), ". Give different tensors different names.");
    }
  }
  return tensors;
}

}  // namespace ddp
