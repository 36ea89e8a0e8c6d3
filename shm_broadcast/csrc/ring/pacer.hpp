// This file decides how a reader waits: it polls briefly, polls while an expected message is due, or sleeps in the
// kernel. The code is pure: it takes times and returns durations. Any further kind of wait belongs in the wait budget that
// this code returns, together with the measurement that justifies it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace endpoint {

enum class Mode : int { kAdaptive, kSpin, kPark };

// The wait budget: a wait polls for `spin_ns` and then sleeps for at most `park_ns`.
struct Budget {
    uint64_t spin_ns;
    uint64_t park_ns;
};

// When a wait ends: it polls until `spin_until`, and sleeps from then until `until`. Both are 0 if it does not wait at all.
// Whoever waits several times within one budget has one of these, so that the waits together take no longer.
struct Term {
    uint64_t spin_until = 0;
    uint64_t until = 0;

    Term() = default;
    Term(uint64_t now, Budget budget) {
        if (budget.spin_ns == 0 && budget.park_ns == 0) return;
        spin_until = later(now, budget.spin_ns);
        until = later(spin_until, budget.park_ns);
    }
    bool waits() const { return until > 0; }
    // Returns this term, cut off at `time`.
    Term before(uint64_t time) const {
        Term result = *this;
        result.spin_until = std::min(spin_until, time);
        result.until = std::min(until, time);
        return result;
    }
    // Returns this term, prolonged so that it polls until `time` at least.
    Term polling(uint64_t time) const {
        Term result = *this;
        result.spin_until = std::max(spin_until, time);
        result.until = std::max(until, time);
        return result;
    }

private:
    static uint64_t later(uint64_t time, uint64_t by) { return by > UINT64_MAX - time ? UINT64_MAX : time + by; }
};

// A waiting reader looks around at this interval: it must notice a death within 1 s. It checks for signals every 100 ms.
inline constexpr int64_t kLookNs = 400 * 1000 * 1000;
// Polling this long is cheaper for both sides than a sleep and a wake-up, which take 5 to 20 us of processor time.
inline constexpr int64_t kShortSpinNs = 15 * 1000;

// Learns the time between messages and returns the wait budget until the next one. `adaptive` expects the next message one
// average gap after the last: it sleeps until shortly before, polls until the message is late, and sleeps again. If the gaps
// vary too much, polling would take too long, so it polls briefly once and then sleeps.
class Pacer {
public:
    // Records when the last message before a wait came; messages that no wait follows are not recorded.
    void arrived(int64_t now) {
        woke(now);  // if the message came before the reader was awake, the reader was at least this late
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

    // Returns the wait budget from `now` on. It is called again after each wait until the message is there.
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
    // Learns how late sleeps end. A later end than known counts at once; others reduce the known value by at most 1/16.
    void woke(int64_t now) {
        if (wakes_ == 0) return;
        if (now > wakes_) lateness_ = std::max(std::min(now - wakes_, kLongestRiseNs), lateness_ - lateness_ / 16);
        wakes_ = 0;
    }

    // The reader wakes up this long before it starts to poll, or 1.5 times the known lateness if that is more. Linux extends
    // sleeps of ordinary threads by up to 50 us (timer slack, see prctl(2)). Waking a core takes 20 us on a quiet machine, and
    // 150 us on a machine whose cores others use too. On a virtual machine, a reader with a fixed 100 us slept through most
    // messages that were 2 ms apart.
    static constexpr int64_t kRiseNs = 80 * 1000, kLongestRiseNs = 400 * 1000;
    // The reader may poll for an expected message for at most 1/3 of the time between two messages, and at most for 1 ms.
    static constexpr int64_t kWatchedPart = 3;
    static constexpr int64_t kLongestWatchNs = 1000 * 1000;
    // The reader polls from 2 average deviations before a message is due until 4 after, and at least for the times below. With
    // half of these times, 45 to 95 of 1,200 messages that were 2 ms apart came before the polling began. If messages are less
    // than 2 ms apart, a part of the gap is enough, because otherwise the reader would not poll for them at all.
    static constexpr int64_t kEarly = 2, kLate = 4;
    static constexpr int64_t kLeastEarlyNs = 80 * 1000, kLeastEarlyPart = 25;
    static constexpr int64_t kLeastLateNs = 120 * 1000, kLeastLatePart = 16;
    // The latest gap has the weight 1/4 in the running averages, so they follow a change within a few messages.
    static constexpr int kShift = 2;
    static constexpr int kSamples = 3;    // number of gaps that must be known before a message is expected
    // One gap counts as at most 4 average deviations (or 20 us, if that is more) off the average. A single pause, or a machine
    // that stood still for a moment, does not spoil the averages.
    static constexpr int64_t kClipped = 4, kLeastClipNs = 20 * 1000;

    int64_t last_ = 0;
    int64_t gap_ = 0;
    int64_t deviation_ = 0;
    int64_t lateness_ = kRiseNs;
    int64_t wakes_ = 0;  // when the reader wants to wake up, while it sleeps until then
    int samples_ = 0;
    bool has_spun_ = false;
};

}  // namespace endpoint
