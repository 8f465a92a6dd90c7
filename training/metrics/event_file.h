// TensorBoard's event files: records of TFRecord, each with an Event of TensorFlow's protocol
// buffers.
#pragma once

#include <string>

#include "metrics/metric_point.h"

namespace ddp {

/// A record as the files have it: its length, the checksum of that, the bytes, their checksum.
///
/// Source: TensorFlow's TFRecord format (tensorflow/core/lib/io/record_writer.h): numbers are
/// little-endian, checksums are CRC-32C, rotated and with a constant added.
std::string event_record(const std::string& payload);

/// The record with which each file begins.
///
/// \param time  seconds since 1970.
std::string first_event(double time);

/// The record of a point. The file has values as float32.
///
/// Source: tensorflow/core/util/event.proto and tensorflow/core/framework/summary.proto.
std::string scalar_event(const MetricPoint& point);

}  // namespace ddp
