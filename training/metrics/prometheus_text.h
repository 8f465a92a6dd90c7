#pragma once

#include <map>
#include <string>

#include "metrics/metric_point.h"

namespace ddp {

/// A name of Prometheus' form, [a-zA-Z_:][a-zA-Z0-9_:]*: every other character becomes "_", and one
/// comes before a digit.
std::string prometheus_name(const std::string& name);

/// Writes the latest points in Prometheus' text format (0.0.4): a gauge for each, and its step as
/// ddp_metric_step{metric="<name>"}. A point whose name is not of Prometheus' form has it as a
/// label, too: "a/b" is a_b{name="a/b"}, and so differs from "a_b" and "a b".
///
/// \param latest  by name.
///
/// Source: prometheus.io/docs/instrumenting/exposition_formats.
std::string prometheus_text(const std::map<std::string, MetricPoint>& latest);

}  // namespace ddp
