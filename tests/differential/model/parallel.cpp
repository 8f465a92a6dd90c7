// Layers that are cut over the mesh's ranks of "tp", which all have the same rows; the reference
// has the whole ones.
#include <ddp/context_parallel.h>
#include <ddp/functional.h>
#include <ddp/parallel_attention.h>
#include <ddp/parallel_linear.h>
#include <ddp/vocab_parallel.h>

#include "differential/net.h"

namespace ddp::differential {

DDP_SOURCE(
    use_clone,
    template <typename Holder>
    void use_clone(torch::nn::Module& parent, const std::string& name, Holder& part) {
      part = Holder(std::dynamic_pointer_cast<typename Holder::ContainedType>(part->clone()));
      parent.replace_module(name, part.ptr());
    });
DDP_SOURCE(
    padded,
    /// With rows of zeros, to a multiple.
    [[maybe_unused]] inline at::Tensor padded(const at::Tensor& x, int64_t multiple) {
      return torch::constant_pad_nd(x, {0, 0, 0, (multiple - x.size(0) % multiple) % multiple});
    });

DDP_SOURCE(
    WholeMlp, struct WholeMlp
    : Layer {
      at::Tensor forward(at::Tensor x) override { return x + down(torch::tanh(up(norm(x)))); }
      torch::nn::LayerNorm norm{
          register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})))};
      torch::nn::Linear up{register_module("up", torch::nn::Linear(4, 12))};
      torch::nn::Linear down{register_module("down", torch::nn::Linear(12, 4))};
    });
DDP_SOURCE(
    CutMlp, enum class Cut{Plain, Sequence, Gathered}; struct CutMlp
    : Layer {
      CutMlp(const ProcessGroup& tp, Cut cut) : tp(tp), cut(cut) {
        const bool sequence = cut == Cut::Sequence;
        norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
        if (sequence) mark_replicated_partial(*norm, tp);
        up = register_module(
            "up", ColumnParallelLinear(
                      ColumnParallelLinearOptions(4, 12)
                          .sequence_parallel(sequence)
                          .gather_output(cut == Cut::Gathered)
                          .process_group(tp),
                      torch::ones({12, 4}), torch::ones({12})));
        down = register_module(
            "down", RowParallelLinear(
                        RowParallelLinearOptions(12, 4)
                            .sequence_parallel(sequence)
                            .input_is_parallel(cut != Cut::Gathered)
                            .process_group(tp),
                        torch::ones({4, 12}), torch::ones({4})));
      }
      at::Tensor forward(at::Tensor x) override {
        if (cut != Cut::Sequence) return x + down(torch::tanh(up(norm(x))));
        const auto part = functional::scatter_to_region(padded(x, tp->getSize()), tp, 0);
        const auto y = functional::gather_from_region(down(torch::tanh(up(norm(part)))), tp, 0);
        return x + y.narrow(0, 0, x.size(0));
      }
      void use_clones() override { use_clone(*this, "up", up), use_clone(*this, "down", down); }
      ProcessGroup tp;
      Cut cut;
      torch::nn::LayerNorm norm{nullptr};
      ColumnParallelLinear up{nullptr};
      RowParallelLinear down{nullptr};
    });

DDP_SOURCE(
    WholeTable, struct WholeTable
    : Layer {
      at::Tensor forward(at::Tensor x) override {
        const auto y = table(torch::arange(x.size(0)) % 5),
                   logits = torch::linear(x, table->weight);
        const auto loss = torch::nn::functional::cross_entropy(
            logits, torch::arange(x.size(0)) % 7,
            torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
        return x + y + loss.unsqueeze(1) / 4;
      }
      torch::nn::Embedding table{register_module("table", torch::nn::Embedding(7, 4))};
    });
// As the table and the head of a language model, of which no rank has all logits.
DDP_SOURCE(
    CutTable, struct CutTable
    : Layer {
      CutTable(const ProcessGroup& tp, bool sequence) : tp(tp), sequence(sequence) {
        table = register_module(
            "table",
            VocabParallelEmbedding(
                VocabParallelEmbeddingOptions(7, 4).sequence_parallel(sequence).process_group(tp),
                torch::ones({7, 4})));
      }
      at::Tensor forward(at::Tensor x) override {
        const auto rows = x.size(0);
        const auto all = (rows + tp->getSize() - 1) / tp->getSize() * tp->getSize();
        auto y = table(torch::arange(sequence ? all : rows) % 5);
        if (sequence) y = functional::gather_from_region(y, tp, 0).narrow(0, 0, rows);
        const auto logits = torch::linear(functional::copy_to_region(x, tp), table->weight);
        const auto loss = vocab_parallel_cross_entropy(
            logits, torch::arange(rows) % 7, tp,
            VocabParallelCrossEntropyOptions().num_classes(7).reduction(torch::kNone));
        return x + y + loss.unsqueeze(1) / 4;
      }
      void use_clones() override { use_clone(*this, "table", table); }
      ProcessGroup tp;
      bool sequence;
      VocabParallelEmbedding table{nullptr};
    });

DDP_SOURCE(
    attend,
    /// Causal attention of [N, heads, T, d].
    [[maybe_unused]] inline at::Tensor attend(
        const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
      const auto scores =
          q.matmul(k.transpose(-2, -1)) / std::sqrt(static_cast<double>(q.size(-1)));
      const auto later = torch::ones({q.size(-2), q.size(-2)}, torch::kBool).triu(1);
      return torch::softmax(scores.masked_fill(later, -INFINITY), -1).matmul(v);
    });
DDP_SOURCE(
    WholeHeads, struct WholeHeads
    : Layer {
      at::Tensor forward(at::Tensor x) override {
        const auto parts = heads->in_proj(x.repeat({1, 3}))
                               .reshape({-1, 3, 12, 1})
                               .permute({1, 2, 0, 3})
                               .unbind(0);
        return x +
               heads
                   ->out_proj(
                       attend(parts[0], parts[1], parts[2]).permute({1, 0, 2}).reshape({-1, 12}))
                   .narrow(1, 0, 4);
      }
      struct Heads : torch::nn::Module {
        torch::nn::Linear in_proj{register_module("in_proj", torch::nn::Linear(12, 36))};
        torch::nn::Linear out_proj{register_module("out_proj", torch::nn::Linear(12, 12))};
      };
      std::shared_ptr<Heads> heads{register_module("heads", std::make_shared<Heads>())};
    });
DDP_SOURCE(
    CutHeads, struct CutHeads
    : Layer {
      CutHeads(const ProcessGroup& tp, bool sequence) : tp(tp), sequence(sequence) {
        heads = ParallelMultiheadAttention(
            ParallelMultiheadAttentionOptions(12, 12)
                .is_causal(true)
                .sequence_parallel(sequence)
                .process_group(tp),
            torch::nn::MultiheadAttention(12, 12));
        register_module("heads", heads);
      }
      at::Tensor forward(at::Tensor x) override {
        auto y = x.repeat({1, 3}).unsqueeze(1);
        if (sequence)
          y = functional::scatter_to_region(
              torch::constant_pad_nd(
                  y, {0, 0, 0, 0, 0, (tp->getSize() - x.size(0) % tp->getSize()) % tp->getSize()}),
              tp, 0);
        y = heads(y);
        if (sequence) y = functional::gather_from_region(y, tp, 0);
        return x + y.narrow(0, 0, x.size(0)).squeeze(1).narrow(1, 0, 4);
      }
      void use_clones() override { use_clone(*this, "heads", heads); }
      ProcessGroup tp;
      bool sequence;
      ParallelMultiheadAttention heads{nullptr};
    });

// The weight is used on parts of the sequence.
DDP_SOURCE(
    WholeSequence, struct WholeSequence
    : Layer {
      at::Tensor forward(at::Tensor x) override {
        const auto t = (x.repeat({1, 3}) * weight).t().reshape({1, 12, -1, 1});
        return x + attend(t, t, t).reshape({12, -1}).t().narrow(1, 0, 4);
      }
      at::Tensor weight = register_parameter("weight", torch::ones({12}));
    });
DDP_SOURCE(
    CutSequence, struct CutSequence
    : Layer {
      CutSequence(const ProcessGroup& tp, bool ring) : tp(tp), ring(ring) {
        mark_replicated_partial(*this, tp);
      }
      at::Tensor forward(at::Tensor x) override {
        const auto rows = x.size(0) > 0 ? x : torch::zeros({1, 4}, x.options());
        const auto part = functional::context_shard(padded(rows, 2 * tp->getSize()), 0, tp);
        const auto t = (part.repeat({1, 3}) * weight).t().reshape({1, 12, -1, 1});
        const auto y = ring ? functional::ring_attention(t, t, t, tp, true)
                            : functional::all_to_all_attention(t, t, t, tp, true);
        return x + functional::context_gather(y.reshape({12, -1}).t(), 0, tp)
                       .narrow(0, 0, x.size(0))
                       .narrow(1, 0, 4);
      }
      ProcessGroup tp;
      bool ring;
      at::Tensor weight = register_parameter("weight", torch::ones({12}));
    });

namespace {

template <typename L, typename Whole, typename... Args>
LayerKind cut(
    const std::string& source, const std::string& whole, const std::string& text, Args... args) {
  LayerKind kind;
  kind.make = [args...](const Rank& tp, const auto&) {
    return std::make_shared<L>(tp.group, args...);
  };
  kind.source = source;
  kind.call = "std::make_shared<" + source + ">(tp.group, " + text + ")";
  kind.alone = [] { return std::make_shared<Whole>(); };
  kind.whole_source = whole;
  return kind;
}

const RegisteredLayer mlp(
    "cut_mlp", cut<CutMlp, WholeMlp>("CutMlp", "WholeMlp", "Cut::Plain", Cut::Plain));
const RegisteredLayer mlp_sequence(
    "cut_mlp_sequence",
    cut<CutMlp, WholeMlp>("CutMlp", "WholeMlp", "Cut::Sequence", Cut::Sequence));
const RegisteredLayer mlp_gathered(
    "cut_mlp_gathered",
    cut<CutMlp, WholeMlp>("CutMlp", "WholeMlp", "Cut::Gathered", Cut::Gathered));
const RegisteredLayer table(
    "cut_table", cut<CutTable, WholeTable>("CutTable", "WholeTable", "false", false));
const RegisteredLayer table_sequence(
    "cut_table_sequence", cut<CutTable, WholeTable>("CutTable", "WholeTable", "true", true));
const RegisteredLayer heads(
    "cut_heads", cut<CutHeads, WholeHeads>("CutHeads", "WholeHeads", "false", false));
const RegisteredLayer heads_sequence(
    "cut_heads_sequence", cut<CutHeads, WholeHeads>("CutHeads", "WholeHeads", "true", true));
const RegisteredLayer ring(
    "cut_ring", cut<CutSequence, WholeSequence>("CutSequence", "WholeSequence", "true", true));
const RegisteredLayer exchange(
    "cut_exchange",
    cut<CutSequence, WholeSequence>("CutSequence", "WholeSequence", "false", false));

}  // namespace
}  // namespace ddp::differential
