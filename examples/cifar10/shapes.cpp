#include "shapes.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <random>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

namespace cifar10 {
namespace {

constexpr int kSize = 32;
constexpr int kPixels = kSize * kSize;
constexpr int kClasses = 10;
constexpr double kPi = 3.14159265358979323846;

using Colour = std::array<double, 3>;
using Canvas = std::array<Colour, kPixels>;

/// Random numbers from std's engine, which is the same everywhere; its distributions are not.
class RandomNumbers {
 public:
  explicit RandomNumbers(uint64_t seed) : engine_(seed) {}

  double between(double low, double high) {
    return low + (high - low) * static_cast<double>(engine_() >> 11) / 9007199254740992.0;
  }
  /// Adds four uniform numbers: close enough to a normal distribution.
  double noise(double deviation) {
    double sum = -2;
    for (int i = 0; i < 4; ++i) sum += between(0, 1);
    return sum * deviation * 1.7320508;
  }
  Colour colour() { return {between(0.1, 0.9), between(0.1, 0.9), between(0.1, 0.9)}; }

 private:
  std::mt19937_64 engine_;
};

/// Whether (u, v), in units of the shape's radius, lies within the shape.
bool is_inside(int shape, double u, double v) {
  const double r = std::hypot(u, v);
  const double box = std::max(std::abs(u), std::abs(v));
  switch (shape) {
    case 0:
      return r < 0.8;
    case 1:
      return box < 0.7;
    case 2:
      return v > -0.55 && v < 0.95 - 1.7320508 * std::abs(u);
    case 3:
      return r > 0.5 && r < 0.9;
    case 4:
      return box < 0.9 && std::min(std::abs(u), std::abs(v)) < 0.25;
    case 5:
      return r < 0.95 && std::sin(u * 3.5 * kPi) > 0;
    case 6:
      return box < 0.8 && (static_cast<int>(std::floor(u * 2.5) + std::floor(v * 2.5)) & 1) != 0;
    case 7:
      return std::abs(u) < 0.85 && std::abs(v) > 0.25 && std::abs(v) < 0.65;
    case 8:
      return r < 0.9 && std::hypot(u - 0.5, v) > 0.65;
    default:
      return box > 0.45 && box < 0.8;
  }
}

/// The position, size and angle of a shape.
struct Placement {
  double x, y, radius, angle;

  bool covers(int shape, double px, double py) const {
    const double dx = (px - x) / radius, dy = (py - y) / radius;
    const double c = std::cos(angle), s = std::sin(angle);
    return is_inside(shape, c * dx + s * dy, c * dy - s * dx);
  }
};

// Paints two colours that blend into each other.
void paint_background(Canvas& canvas, RandomNumbers& random) {
  const auto from = random.colour(), to = random.colour();
  const double angle = random.between(0, 2 * kPi);
  for (int i = 0; i < kPixels; ++i) {
    const double along =
        ((i % kSize - 15.5) * std::cos(angle) + (i / kSize - 15.5) * std::sin(angle)) / 44 + 0.5;
    for (int c = 0; c < 3; ++c) canvas[i][c] = from[c] + (to[c] - from[c]) * along;
  }
}

void paint(Canvas& canvas, const Placement& at, int shape, const Colour& colour) {
  for (int i = 0; i < kPixels; ++i) {
    // No shape reaches further.
    if (std::hypot(i % kSize - at.x, i / kSize - at.y) > 1.4 * at.radius) continue;
    int hits = 0;  // of four points of the pixel
    for (int k = 0; k < 4; ++k) {
      if (at.covers(shape, i % kSize + 0.5 * (k & 1), i / kSize + 0.5 * (k >> 1))) ++hits;
    }
    for (int c = 0; c < 3; ++c) canvas[i][c] += (colour[c] - canvas[i][c]) * hits / 4;
  }
}

// Draws a colour that differs visibly from the background.
Colour colour_on(const Canvas& canvas, const Placement& at, RandomNumbers& random) {
  const auto& there = canvas
      [std::clamp(static_cast<int>(at.y), 0, 31) * kSize +
       std::clamp(static_cast<int>(at.x), 0, 31)];
  for (;;) {
    const auto colour = random.colour();
    double distance = 0;
    for (int c = 0; c < 3; ++c) distance += std::abs(colour[c] - there[c]);
    if (distance > 0.9) return colour;
  }
}

Canvas draw(int shape, RandomNumbers& random) {
  Canvas canvas;
  paint_background(canvas, random);
  for (int i = 0; i < 4; ++i) {  // clutter
    const Placement at{
        random.between(0, 32), random.between(0, 32), random.between(1.5, 3.5),
        random.between(0, 2 * kPi)};
    paint(canvas, at, static_cast<int>(random.between(0, 3)), random.colour());
  }
  const Placement at{
      random.between(10, 22), random.between(10, 22), random.between(8, 13),
      random.between(0, 2 * kPi)};
  paint(canvas, at, shape, colour_on(canvas, at, random));
  for (auto& pixel : canvas) {
    for (auto& value : pixel) value += random.noise(0.05);
  }
  return canvas;
}

}  // namespace

examples::LabeledImages draw_shapes(int64_t count, uint64_t seed) {
  RandomNumbers random(seed);
  examples::LabeledImages data{
      at::empty({count, 3, kSize, kSize}, at::kByte), at::empty({count}, at::kLong)};
  auto* pixel = data.images.mutable_data_ptr<uint8_t>();
  auto* label = data.labels.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    const auto shape = static_cast<int>(i % kClasses);
    const auto canvas = draw(shape, random);
    *label++ = shape;
    for (int c = 0; c < 3; ++c) {
      for (const auto& colour : canvas) {
        *pixel++ = static_cast<uint8_t>(std::clamp(colour[c] * 255, 0.0, 255.0));
      }
    }
  }
  return data;
}

void write_cifar10(const examples::LabeledImages& data, const std::string& path) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  const auto bytes = data.images[0].numel();
  for (int64_t i = 0; i < data.labels.size(0); ++i) {
    file.put(static_cast<char>(data.labels[i].item<int64_t>()));
    const auto image = data.images[i].contiguous();
    file.write(reinterpret_cast<const char*>(image.const_data_ptr<uint8_t>()), bytes);
  }
  file.close();
  TORCH_CHECK(
      file.good(), path, ": expected to write ", data.labels.size(0), " images, got ",
      std::strerror(errno), ". Choose a folder with room that you may write to.");
}

}  // namespace cifar10
