#include "plan/report.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <vector>

#include <ddp/internal/text.h>

#include "plan/unit_text.h"

namespace ddp::plan {
namespace {

const char* name_of(const Layout& layout) {
  if (layout.pp == 1) return "-";
  switch (layout.schedule) {
    case PipelineSchedule::GPipe:
      return "gpipe";
    case PipelineSchedule::OneFOneB:
      return "1f1b";
    case PipelineSchedule::Interleaved:
      return layout.chunks == 1 ? "eager" : "interleaved";
  }
  return "-";
}

std::string mesh_text(const Layout& layout) {
  return str(layout.dp, " x ", layout.tp, " x ", layout.pp, layout.fsdp ? " with fsdp" : "");
}

std::string percent_text(double part, double whole) {
  OutputText text;
  text << std::fixed << std::setprecision(1) << 100 * part / whole << "%";
  return text.str();
}

using Row = std::vector<std::string>;

Row row_of(const Plan& plan) {
  const auto& [layout, memory, time] = plan;
  const auto total = time.total();
  return {
      str(layout.dp),
      str(layout.tp),
      str(layout.pp),
      layout.fsdp ? "yes" : "no",
      str(layout.microbatches),
      name_of(layout),
      bytes_text(memory.total()),
      seconds_text(total),
      percent_text(time.compute, total),
      percent_text(time.tensor, total),
      percent_text(time.idle, total),
      percent_text(time.data, total),
      percent_text(time.update, total)};
}

/// Right-aligned columns.
std::string aligned(const std::vector<Row>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  OutputText text;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      text << (i == 0 ? "" : "  ") << std::setw(static_cast<int>(widths[i])) << row[i];
    }
    text << '\n';
  }
  return text.str();
}

/// Reasons with the meshes that they keep away, each once.
std::string reasons_text(const std::vector<Rejection>& rejected) {
  std::vector<std::string> order;
  std::map<std::string, std::vector<std::string>> meshes;
  for (const auto& one : rejected) {
    auto& names = meshes[one.reason];
    if (names.empty()) order.push_back(one.reason);
    names.push_back(mesh_text(one.layout));
  }
  OutputText text;
  for (const auto& reason : order) {
    text << "  " << joined_by(", ", meshes[reason]) << ": " << reason << '\n';
  }
  return text.str();
}

std::string json_of_layout(const Layout& layout) {
  return str(
      "\"dp\": ", layout.dp, ", \"tp\": ", layout.tp, ", \"pp\": ", layout.pp,
      ", \"fsdp\": ", layout.fsdp ? "true" : "false", ", \"microbatches\": ", layout.microbatches,
      ", \"schedule\": ", json_text(name_of(layout)), ", \"chunks\": ", layout.chunks);
}

std::string json_of_plan(const Plan& plan) {
  const auto& [layout, memory, time] = plan;
  return str(
      "{", json_of_layout(layout), ", \"memory\": {\"total\": ", memory.total(),
      ", \"state\": ", memory.state, ", \"whole\": ", memory.whole,
      ", \"activations\": ", memory.activations, ", \"beside\": ", memory.beside,
      "}, \"seconds\": {\"total\": ", time.total(), ", \"compute\": ", time.compute,
      ", \"tensor\": ", time.tensor, ", \"idle\": ", time.idle, ", \"data\": ", time.data,
      ", \"update\": ", time.update, "}}");
}

std::string json_of_rejection(const Rejection& rejection) {
  const auto& layout = rejection.layout;
  return str(
      "{\"dp\": ", layout.dp, ", \"tp\": ", layout.tp, ", \"pp\": ", layout.pp,
      ", \"fsdp\": ", layout.fsdp ? "true" : "false", ", \"reason\": ", json_text(rejection.reason),
      "}");
}

}  // namespace

std::string table_of(const Task& task, const Plans& plans, size_t top) {
  const auto& model = task.model;
  const auto& cluster = task.cluster;
  const auto batch = task.batch;
  OutputText text;
  text << model.parameters << " parameters in " << model.layers << " layers on " << cluster.ranks
       << (cluster.ranks == 1 ? " rank" : " ranks") << " of " << cluster.hosts
       << (cluster.hosts == 1 ? " host" : " hosts") << "; a step of " << batch << " x "
       << model.sequence << " positions takes " << std::setprecision(4)
       << static_cast<double>(batch) * step_operations(model) << " operations\n\n";
  if (plans.fitting.empty()) {
    text << "No mesh fits.\n";
  } else {
    const auto shown = std::min(top, plans.fitting.size());
    std::vector<Row> rows{
        {"dp", "tp", "pp", "fsdp", "m", "schedule", "memory", "step", "compute", "tp sums", "idle",
         "dp", "update"}};
    for (size_t i = 0; i < shown; ++i) rows.push_back(row_of(plans.fitting[i]));
    text << aligned(rows);
    if (shown < plans.fitting.size()) {
      text << "and " << plans.fitting.size() - shown << " more (--top)\n";
    }
  }
  if (!plans.rejected.empty()) {
    text << "\nWhat does not fit, dp x tp x pp:\n" << reasons_text(plans.rejected);
  }
  return text.str();
}

std::string json_of(const Task& task, const Plans& plans) {
  std::vector<std::string> fitting, rejected;
  for (const auto& plan : plans.fitting) fitting.push_back("    " + json_of_plan(plan));
  for (const auto& one : plans.rejected) rejected.push_back("    " + json_of_rejection(one));
  return str(
      "{\n  \"operations\": ", static_cast<double>(task.batch) * step_operations(task.model),
      ",\n  \"plans\": [\n", joined_by(",\n", fitting), "\n  ],\n  \"rejected\": [\n",
      joined_by(",\n", rejected), "\n  ]\n}\n");
}

}  // namespace ddp::plan
