// How a reader waits: spin briefly, spin while an expected message is due, or sleep in the kernel. Pure: times in, durations
// out. Other ways to wait, such as naps, belong into the budget that this returns, with the measurement that asks for them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace endpoint {

enum class Mode : int { kAdaptive, kSpin, kPark };

// How long a wait polls, and how long it then sleeps at most, in ns.
struct Budget {
    uint64_t spin_ns;
    uint64_t park_ns;
};

// A reader looks around after so long: death must be noticed within 1 s. Signals are looked for every 100 ms.
inline constexpr int64_t kLookNs = 400 * 1000 * 1000;
// Polling this long is cheaper for both sides than a sleep and a wake-up, 5 to 20 us of processor time.
inline constexpr int64_t kShortSpinNs = 15 * 1000;

// Learns the time between messages and says what to do until the next one. `adaptive` expects the next message one
// average gap after the last: it sleeps until shortly before, polls until the message is late, and sleeps again. Where the
// gaps vary so much that polling would take too long, it polls briefly once and sleeps.
class Pacer {
public:
    // Notes when a message came; called only when the reader had to wait for it.
    void arrived(int64_t now) {
        woke(now);  // where the message came before the reader was up, it was at least this late
        const int64_t gap = now - last_;
        if (last_ != 0 && samples_ == 0) {
            gap_ = gap;
            deviation_ = gap >> kShift;
            samples_ = 1;
        } else if (last_ != 0) {
            const int64_t most = std::max(kClipped * deviation_, kLeastClipNs);
            const int64_t off = std::clamp(gap - gap_, -most, most);
            gap_ += off >> kShift;
            deviation_ += (std::abs(off) - deviation_) >> kShift;
            samples_ = std::min(samples_ + 1, kSamples);
        }
        last_ = now;
        has_spun_ = false;
    }

    // Returns what to do now; called again after each such wait until the message is there.
    Budget budget(Mode mode, int64_t now) {
        if (mode == Mode::kSpin) return {static_cast<uint64_t>(kLookNs), 0};
        if (mode == Mode::kPark) return {0, static_cast<uint64_t>(kLookNs)};
        if (now >= wakes_) woke(now);
        const int64_t rise = std::clamp(lateness_ + lateness_ / 2, kRiseNs, kLongestRiseNs);
        const int64_t early = std::max(kEarly * deviation_, std::min(kLeastEarlyNs, gap_ / kLeastEarlyPart));
        const int64_t late = std::max(kLate * deviation_, std::min(kLeastLateNs, gap_ / kLeastLatePart));
        if (samples_ == kSamples && rise + early + late <= std::min(gap_ / kWatchedPart, kLongestWatchNs)) {
            const int64_t due = last_ + gap_;
            const int64_t until_rise = std::min(due - early - rise - now, kLookNs);
            if (until_rise > kShortSpinNs) {
                wakes_ = now + until_rise;
                return {0, static_cast<uint64_t>(until_rise)};
            }
            if (due + late > now) {
                has_spun_ = true;
                return {static_cast<uint64_t>(due + late - now), static_cast<uint64_t>(kLookNs)};
            }
        }
        const bool spins = !has_spun_;
        has_spun_ = true;
        return {static_cast<uint64_t>(spins ? kShortSpinNs : 0), static_cast<uint64_t>(kLookNs)};
    }

private:
    // Learns how late sleeps end: the latest counts, and is forgotten by 1/16 with each one that was less late.
    void woke(int64_t now) {
        if (wakes_ == 0) return;
        if (now > wakes_) lateness_ = std::max(std::min(now - wakes_, kLongestRiseNs), lateness_ - lateness_ / 16);
        wakes_ = 0;
    }

    // The reader gets up this much before it starts to poll, or 1.5 times as much as it woke late: Linux rounds sleeps of
    // ordinary threads up by as much as 50 us (timer slack, prctl(2)), and waking a core takes 20 us on a quiet machine and
    // 150 us on one whose cores others use too. On a virtual machine a fixed 100 us slept through most messages 2 ms apart.
    static constexpr int64_t kRiseNs = 80 * 1000, kLongestRiseNs = 400 * 1000;
    // The part of the time between two messages for which an expected one may be awaited awake: 1/3, and 1 ms.
    static constexpr int64_t kWatchedPart = 3;
    static constexpr int64_t kLongestWatchNs = 1000 * 1000;
    // A message is awaited from 2 average deviations before it is due until 4 after, and this long at least: of 1,200
    // messages 2 ms apart 45 to 95 came earlier with half of it. Where messages are less than 2 ms apart a part of the gap
    // is enough, as else they would not be awaited at all.
    static constexpr int64_t kEarly = 2, kLate = 4;
    static constexpr int64_t kLeastEarlyNs = 80 * 1000, kLeastEarlyPart = 25;
    static constexpr int64_t kLeastLateNs = 120 * 1000, kLeastLatePart = 16;
    // Weight of the latest gap in the running averages: 1/4 follows a change within a few messages.
    static constexpr int kShift = 2;
    static constexpr int kSamples = 3;    // gaps that must have been seen before anything is expected
    // One gap counts as at most 4 average deviations (and 20 us) off the average: a single pause, or a machine that stood
    // still for a moment, does not spoil what is known.
    static constexpr int64_t kClipped = 4, kLeastClipNs = 20 * 1000;

    int64_t last_ = 0;
    int64_t gap_ = 0;
    int64_t deviation_ = 0;
    int64_t lateness_ = kRiseNs;
    int64_t wakes_ = 0;  // when the reader wants to wake, while it sleeps until then
    int samples_ = 0;
    bool has_spun_ = false;
};

}  // namespace endpoint
