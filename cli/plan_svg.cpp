#include "plan_svg.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <sstream>

namespace mla::cli {
namespace {

constexpr double kLeft = 124.0;
constexpr double kChartWidth = 860.0;
constexpr double kLegendWidth = 176.0;
constexpr double kTop = 78.0;
constexpr double kBarsHeight = 120.0;
constexpr double kMostLanesHeight = 900.0;  // the picture of a huge batch still fits a page
constexpr double kTallestLane = 28.0;
constexpr int kLegendEntries = 32;
constexpr std::size_t kLongestTitle = 130;

/// Lane of one row block of one request.
struct Lane {
  std::int32_t request;
  std::int32_t row_begin;
  std::int32_t row_end;
};

std::string number(double value) {
  std::array<char, 32> buffer{};
  std::snprintf(buffer.data(), buffer.size(), "%.2f", value);
  return buffer.data();
}

/// 1234567 as 1,234,567.
std::string grouped(std::int64_t value) {
  const std::string digits = std::to_string(value);
  std::string result;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) result += ',';
    result += digits[i];
  }
  return result;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (char c : text) {
    if (c == '<') result += "&lt;";
    else if (c == '>') result += "&gt;";
    else if (c == '&') result += "&amp;";
    else if (c == '"') result += "&quot;";
    else if (static_cast<unsigned char>(c) >= 0x20) result += c;
  }
  return result;
}

std::string hex(double red, double green, double blue) {
  std::array<char, 16> buffer{};
  const auto byte = [](double x) { return static_cast<int>(std::lround(std::clamp(x, 0.0, 1.0) * 255)); };
  std::snprintf(buffer.data(), buffer.size(), "#%02x%02x%02x", byte(red), byte(green), byte(blue));
  return buffer.data();
}

/// Up to ten workers get colours that most colour-blind readers tell apart; more get hues in worker
/// order, light and dark in turn, so that neighbours differ and the order stays visible.
std::string worker_color(int worker, int num_workers) {
  static constexpr std::array kFew = {"#4477aa", "#ee7733", "#228833", "#ccbb44", "#aa3377",
                                      "#66ccee", "#8c564b", "#bbbbbb", "#ee99aa", "#555555"};
  if (num_workers <= static_cast<int>(kFew.size())) return kFew[static_cast<std::size_t>(worker)];
  const double hue = 300.0 * worker / num_workers;
  const double lightness = worker % 2 == 0 ? 0.42 : 0.66;
  const double chroma = (1.0 - std::abs(2.0 * lightness - 1.0)) * 0.65;
  const auto channel = [&](double shift) {
    const double k = std::fmod(shift + hue / 30.0, 12.0);
    return lightness - chroma / 2.0 * std::max(-1.0, std::min({k - 3.0, 9.0 - k, 1.0}));
  };
  return hex(channel(0), channel(8), channel(4));
}

/// A step of 1, 2 or 5 times a power of ten that gives at most `most` ticks.
std::int64_t tick_step(std::int64_t range, int most) {
  std::int64_t step = 1;
  for (int i = 0; range / step > most; ++i) step = i % 3 == 1 ? step / 2 * 5 : step * 2;
  return step;
}

class Picture {
 public:
  explicit Picture(const PlanPicture& plan) : plan_(plan) {
    for (const Split& split : plan.splits) {
      last_key_ = std::max(last_key_, split.key_end);
      const auto same = [&split](const Lane& lane) {
        return lane.request == split.request && lane.row_begin == split.row_begin;
      };
      if (lanes_.empty() || !same(lanes_.back())) {
        lanes_.push_back({split.request, split.row_begin, split.row_end});
      }
    }
    // Splits come by worker; a lane is wherever its block lies in the batch.
    const auto key = [](const Lane& lane) { return std::pair(lane.request, lane.row_begin); };
    std::sort(lanes_.begin(), lanes_.end(), [&](const Lane& a, const Lane& b) { return key(a) < key(b); });
    lanes_.erase(std::unique(lanes_.begin(), lanes_.end(),
                             [&](const Lane& a, const Lane& b) { return key(a) == key(b); }),
                 lanes_.end());
    const double count = std::max<double>(1.0, static_cast<double>(lanes_.size()));
    lane_height_ = std::min(kTallestLane, kMostLanesHeight / count);
    lanes_bottom_ = kTop + lane_height_ * count;
  }

  std::string draw() {
    const double height = lanes_bottom_ + 56.0 + 40.0 + kBarsHeight + 54.0;
    const double width = kLeft + kChartWidth + kLegendWidth;
    out_ << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << width << "\" height=\""
         << number(height) << "\" viewBox=\"0 0 " << width << ' ' << number(height)
         << "\" font-family=\"Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif\" "
            "font-size=\"12\" fill=\"#333333\">\n"
         << "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n";
    text(kLeft, 28, "Which worker reads which keys", "font-size=\"17\" font-weight=\"bold\"");
    std::string title = plan_.backend + ", " + std::to_string(plan_.num_workers) + " workers: " + plan_.title;
    if (title.size() > kLongestTitle) title = title.substr(0, kLongestTitle) + " ...";
    text(kLeft, 50, title, "fill=\"#666666\"");
    draw_axes();
    draw_splits();
    draw_bars(lanes_bottom_ + 56.0 + 40.0);
    draw_legend();
    out_ << "</svg>\n";
    return out_.str();
  }

 private:
  double x_of(std::int64_t key) const {
    return kLeft + kChartWidth * static_cast<double>(key) /
                       static_cast<double>(std::max<std::int64_t>(1, last_key_));
  }
  double y_of(std::size_t lane) const { return kTop + lane_height_ * static_cast<double>(lane); }

  void text(double x, double y, const std::string& content, const std::string& style) {
    out_ << "<text x=\"" << number(x) << "\" y=\"" << number(y) << "\" " << style << '>'
         << escaped(content) << "</text>\n";
  }
  void line(double x1, double y1, double x2, double y2, const char* style) {
    out_ << "<line x1=\"" << number(x1) << "\" y1=\"" << number(y1) << "\" x2=\"" << number(x2)
         << "\" y2=\"" << number(y2) << "\" " << style << "/>\n";
  }
  void rectangle(double x, double y, double width, double height, const std::string& style,
                 const std::string& title) {
    out_ << "<rect x=\"" << number(x) << "\" y=\"" << number(y) << "\" width=\"" << number(width)
         << "\" height=\"" << number(height) << "\" " << style;
    if (title.empty()) out_ << "/>\n";
    else out_ << "><title>" << escaped(title) << "</title></rect>\n";
  }

  void draw_axes() {
    const std::int64_t step = tick_step(std::max<std::int64_t>(1, last_key_), 8);
    for (std::int64_t key = 0; key <= last_key_; key += step) {
      line(x_of(key), kTop, x_of(key), lanes_bottom_ + 5, "stroke=\"#dddddd\"");
      text(x_of(key), lanes_bottom_ + 20, grouped(key), "text-anchor=\"middle\"");
    }
    text(kLeft + kChartWidth / 2, lanes_bottom_ + 40, "key position", "text-anchor=\"middle\"");
    const double middle = (kTop + lanes_bottom_) / 2;
    text(20, middle, "request",
         "text-anchor=\"middle\" transform=\"rotate(-90 20 " + number(middle) + ")\"");

    // Labels keep a distance of a line of text, whatever the number of lanes, and show round numbers.
    const std::int64_t num_requests = lanes_.empty() ? 1 : lanes_.back().request + 1;
    const auto most = static_cast<int>(std::max(1.0, (lanes_bottom_ - kTop) / 13.0));
    const std::int64_t label_step = tick_step(num_requests, most);
    const bool show_rows = lane_height_ >= 14 && lanes_.size() > 1 && has_blocks();
    double last_y = -100;
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      const bool first_of_request = i == 0 || lanes_[i].request != lanes_[i - 1].request;
      const double y = y_of(i) + lane_height_ / 2 + 4;
      if ((!first_of_request && !show_rows) || y - last_y < 12.5) continue;
      if (lanes_[i].request % label_step != 0) continue;
      std::string label = std::to_string(lanes_[i].request);
      if (show_rows) {
        label += " (" + std::to_string(lanes_[i].row_begin) + "-" + std::to_string(lanes_[i].row_end - 1) + ")";
      }
      text(kLeft - 8, y, label, "text-anchor=\"end\" font-size=\"11\"");
      last_y = y;
    }
    line(kLeft, kTop, kLeft, lanes_bottom_, "stroke=\"#888888\"");
    line(kLeft, lanes_bottom_, kLeft + kChartWidth, lanes_bottom_, "stroke=\"#888888\"");
  }

  bool has_blocks() const {
    for (std::size_t i = 1; i < lanes_.size(); ++i) {
      if (lanes_[i].request == lanes_[i - 1].request) return true;
    }
    return false;
  }

  void draw_splits() {
    const double gap = lane_height_ >= 6 ? lane_height_ * 0.16 : 0.0;
    for (const Split& split : plan_.splits) {
      if (split.key_begin >= split.key_end) continue;
      const auto lane = std::lower_bound(
          lanes_.begin(), lanes_.end(), split, [](const Lane& a, const Split& b) {
            return std::pair(a.request, a.row_begin) < std::pair(b.request, b.row_begin);
          });
      const double x = x_of(split.key_begin);
      const double width = std::max(0.5, x_of(split.key_end) - x);
      const double y = y_of(static_cast<std::size_t>(lane - lanes_.begin())) + gap / 2;
      const std::string worker = std::to_string(split.worker);
      std::ostringstream title;
      title << "worker " << worker << ", request " << split.request << ", rows " << split.row_begin << '-'
            << split.row_end - 1 << ", keys " << split.key_begin << '-' << split.key_end - 1;
      std::string style = "fill=\"" + worker_color(split.worker, plan_.num_workers) + "\"";
      if (width > 3 && lane_height_ >= 6) style += " stroke=\"#ffffff\" stroke-width=\"1\"";
      rectangle(x, y, width, lane_height_ - gap, style, title.str());
      if (width > 30 && lane_height_ >= 15) {
        text(x + width / 2, y + (lane_height_ - gap) / 2 + 4, worker,
             "text-anchor=\"middle\" font-size=\"11\" fill=\"#ffffff\" stroke=\"#00000066\" "
             "stroke-width=\"2\" paint-order=\"stroke\"");
      }
    }
  }

  /// Work of each worker as a share of the mean.
  void draw_bars(double top) {
    const std::vector<double> work = plan_.work_by_worker();
    double total = 0.0;
    double largest = 0.0;
    for (double w : work) {
      total += w;
      largest = std::max(largest, w);
    }
    const double mean = total / static_cast<double>(work.size());
    const double full = std::max(largest, mean) * 1.15;
    const double bottom = top + kBarsHeight;
    text(kLeft, top - 12, "Work of each worker, 100% = mean", "font-weight=\"bold\"");
    const double slot = kChartWidth / static_cast<double>(work.size());
    const double bar = std::min(slot * 0.8, 60.0);
    const std::int64_t label_every = tick_step(static_cast<std::int64_t>(work.size()),
                                               static_cast<int>(kChartWidth / 26.0));
    for (std::size_t i = 0; i < work.size(); ++i) {
      const int worker = static_cast<int>(i);
      const double height = full > 0 ? kBarsHeight * work[i] / full : 0.0;
      const double center = kLeft + slot * (static_cast<double>(i) + 0.5);
      const int percent = mean > 0 ? static_cast<int>(std::lround(100 * work[i] / mean)) : 0;
      rectangle(center - bar / 2, bottom - height, bar, height,
                "fill=\"" + worker_color(worker, plan_.num_workers) + "\"",
                "worker " + std::to_string(worker) + ": " + std::to_string(percent) + "% of the mean");
    }
    if (full > 0) {
      const double y = bottom - kBarsHeight * mean / full;
      line(kLeft, y, kLeft + kChartWidth, y, "stroke=\"#333333\" stroke-dasharray=\"4 3\"");
      text(kLeft - 8, y + 4, "100%", "text-anchor=\"end\" font-size=\"11\"");
    }
    for (std::size_t i = 0; i < work.size(); ++i) {
      const int worker = static_cast<int>(i);
      const double height = full > 0 ? kBarsHeight * work[i] / full : 0.0;
      const double center = kLeft + slot * (static_cast<double>(i) + 0.5);
      const int percent = mean > 0 ? static_cast<int>(std::lround(100 * work[i] / mean)) : 0;
      if (worker % label_every == 0) {
        text(center, bottom + 16, std::to_string(worker), "text-anchor=\"middle\" font-size=\"11\"");
      }
      if (slot >= 44) {
        text(center, bottom - height - 4, std::to_string(percent) + "%",
             "text-anchor=\"middle\" font-size=\"11\" stroke=\"#ffffff\" stroke-width=\"3\" "
             "paint-order=\"stroke\"");
      }
    }
    line(kLeft, bottom, kLeft + kChartWidth, bottom, "stroke=\"#888888\"");
    text(kLeft - 8, bottom + 4, "0%", "text-anchor=\"end\" font-size=\"11\"");
    text(kLeft + kChartWidth / 2, bottom + 36, "worker", "text-anchor=\"middle\"");
  }

  void draw_legend() {
    const double x = kLeft + kChartWidth + 28;
    text(x, kTop + 8, "worker", "font-weight=\"bold\"");
    const int shown = std::min(plan_.num_workers, kLegendEntries);
    // An odd step shows light and dark colours in turn.
    const int every = ((plan_.num_workers + shown - 1) / shown) | 1;
    double y = kTop + 18;
    for (int worker = 0; worker < plan_.num_workers; worker += every) {
      rectangle(x, y, 14, 12, "fill=\"" + worker_color(worker, plan_.num_workers) + "\"", "");
      text(x + 22, y + 10, std::to_string(worker), "font-size=\"11\"");
      y += 17;
    }
    if (every > 1) {
      text(x, y + 12, "one worker in " + std::to_string(every), "font-size=\"11\" fill=\"#666666\"");
    }
  }

  const PlanPicture& plan_;
  std::vector<Lane> lanes_;
  std::int64_t last_key_ = 0;
  double lane_height_ = kTallestLane;
  double lanes_bottom_ = kTop;
  std::ostringstream out_;
};

}  // namespace

std::vector<double> PlanPicture::work_by_worker() const {
  std::vector<double> total(static_cast<std::size_t>(num_workers), 0.0);
  for (const Split& split : splits) total[static_cast<std::size_t>(split.worker)] += work(split);
  return total;
}

std::string plan_svg(const PlanPicture& picture) { return Picture(picture).draw(); }

}  // namespace mla::cli
