// The collectives as steps. DESIGN.md has a table of what each step moves.
#include "call.hpp"

namespace region {
namespace {

// Up to this size, for all ranks together, a rank reduces or copies the data of a call in about 10 us.
constexpr size_t kShortBytes = 128 << 10;

// memcpy for pieces that may be empty and then have a null address.
void copy(unsigned char* to, const unsigned char* from, size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
}

// What the status page says of a call. The code is laid out as in `code_of`.
status::Call shown(const Plan& plan) {
    const uint64_t code = plan.view.code;
    status::Call call;
    call.kind = static_cast<uint8_t>(code);
    call.dtype = static_cast<uint8_t>(code >> 8);
    call.op = static_cast<uint8_t>(code >> 16);
    call.root = static_cast<uint32_t>(code >> 24);
    call.number = plan.view.number;
    call.count = plan.view.count;
    call.detail = plan.view.detail;
    call.nbytes = plan.bytes != 0 ? plan.bytes : plan.columns.rows * plan.columns.row_bytes;
    return call;
}

}  // namespace

void Columns::put(uint32_t rank, unsigned char* whole, const unsigned char* piece, size_t from, size_t bytes) const {
    const size_t width = widths[rank];
    while (bytes > 0) {
        const size_t column = from % width;
        const size_t run = std::min(width - column, bytes);
        copy(whole + from / width * row_bytes + starts[rank] + column, piece, run);
        piece += run, from += run, bytes -= run;
    }
}

void Columns::take(uint32_t rank, const unsigned char* whole, unsigned char* piece, size_t from, size_t bytes) const {
    const size_t width = widths[rank];
    while (bytes > 0) {
        const size_t column = from % width;
        const size_t run = std::min(width - column, bytes);
        copy(piece, whole + from / width * row_bytes + starts[rank] + column, run);
        piece += run, from += run, bytes -= run;
    }
}

Call::Call(SharedRegion& region, Plan plan, uint64_t arrived)
    : region_(region), plan_(std::move(plan)), arrived_(arrived), inputs_(region.ranks()) {
    chunk_ = step_bytes();
    steps_ = count_steps();
}

// Bytes of each piece that one step moves: a whole slot, or a share of it if the slot holds a piece for each rank.
size_t Call::step_bytes() const {
    const size_t slot = region_.slot_bytes();
    switch (plan_.kind) {
        case Kind::kAllReduceTwoShot:  // a share for each rank, and this rank's result
            return slot / (region_.ranks() + 1) / kLine * kLine;
        case Kind::kReduceScatter:
        case Kind::kScatter: return slot / region_.ranks() / kLine * kLine;
        case Kind::kAllToAll: return table_offset(region_) / region_.ranks() / kLine * kLine;
        default: return slot;
    }
}

uint64_t Call::count_steps() const {
    size_t longest = plan_.bytes;
    for (const Columns* columns : {&plan_.columns, &plan_.out_columns}) {
        for (size_t r = 0; r < columns->widths.size(); ++r) {
            longest = std::max(longest, columns->bytes_of(static_cast<uint32_t>(r)));
        }
    }
    if (plan_.kind == Kind::kAllReduceTwoShot) {
        // Each step moves one share of the data for every rank, and the results of the previous step.
        const size_t round = chunk_ * region_.ranks();
        return (plan_.bytes + round - 1) / round + 1;
    }
    return std::max<uint64_t>(1, (longest + chunk_ - 1) / chunk_);
}

Wait Call::run(uint64_t spin_ns, uint64_t until_ns) {
    while (!is_posted_ && at_ == 0 && !region_.catch_up()) {
        const Wait status = region_.wait(spin_ns, until_ns);
        if (status != Wait::kDone) return status;
    }
    while (at_ < steps_) {
        post();
        const Wait status = region_.wait(spin_ns, until_ns);
        if (status != Wait::kDone) return status;
        if (region_.is_broken()) return Wait::kLeft;
        if (!all_agree() || (at_ == 0 && plan_.kind == Kind::kAllToAll && !all_match())) {
            disagrees_ = true;
            return Wait::kDone;
        }
        // If ranks move different amounts, all take as many steps as the rank that needs most.
        if (at_ == 0) {
            for (uint32_t r = 0; r < region_.ranks(); ++r) steps_ = std::max(steps_, region_.posted(r).steps);
            compare_arrivals();
        }
        consume();
        is_posted_ = false;
        ++at_;
    }
    return Wait::kDone;
}

void Call::post() {
    if (is_posted_) return;
    region_.begin();
    publish();
    region_.post(plan_.view, steps_, at_ == 0 ? arrived_ : 0);
    is_posted_ = true;
}

void Call::show() {
    if (is_shown_) return;
    is_shown_ = true;
    if (region_.lane() != nullptr) region_.lane()->begin(shown(plan_), arrived_);
}

// Finds out which rank arrived last. The arrival times are in the cache lines that were read for the views,
// so this causes no further cache miss.
void Call::compare_arrivals() {
    if (region_.lane() == nullptr) return;
    uint64_t latest = 0, before = 0;
    for (uint32_t r = 0; r < region_.ranks(); ++r) {
        const uint64_t arrived = region_.posted(r).arrived;
        if (arrived > latest) {
            before = latest;
            latest = arrived;
            arrivals_.last = static_cast<uint16_t>(r);
        } else {
            before = std::max(before, arrived);
        }
    }
    // `before` is 0 in a group of one, and where at most one rank shows its calls in the status page.
    arrivals_.late = before == 0 ? 0 : latest - before;
    arrivals_.is_last = arrivals_.last == region_.rank();
    arrivals_.waited = latest - std::min(latest, arrived_);
}

bool Call::is_soon_done() {
    if (steps_ > 1 || plan_.bytes * region_.ranks() > kShortBytes || !plan_.columns.widths.empty()) return false;
    if (!is_posted_ && !region_.catch_up()) return false;
    post();
    // Done after the post, so no rank waits for it; it takes less time than the others' posts need to arrive.
    show();
    return region_.poll();
}

bool Call::all_agree() {
    for (uint32_t r = 0; r < region_.ranks(); ++r) {
        if (region_.posted(r).view != plan_.view) return false;
    }
    return true;
}

// Whether each rank sends to each other rank what that rank expects. All ranks check all pairs, so all agree.
bool Call::all_match() {
    const uint32_t ranks = region_.ranks();
    const size_t offset = table_offset(region_);
    for (uint32_t from = 0; from < ranks; ++from) {
        const auto* sent = reinterpret_cast<const uint64_t*>(region_.slot(from) + offset);
        for (uint32_t to = 0; to < ranks; ++to) {
            const auto* expected = reinterpret_cast<const uint64_t*>(region_.slot(to) + offset) + ranks;
            if (sent[to] != expected[from]) return false;
        }
    }
    return true;
}

void Call::publish_table() {
    const uint32_t ranks = region_.ranks();
    auto* table = reinterpret_cast<uint64_t*>(region_.slot(region_.rank()) + table_offset(region_));
    for (uint32_t r = 0; r < ranks; ++r) {
        table[r] = plan_.columns.widths[r];
        table[ranks + r] = plan_.out_columns.widths[r];
    }
}

void Call::publish() {
    const uint32_t self = region_.rank();
    unsigned char* slot = region_.slot(self);
    switch (plan_.kind) {
        case Kind::kBarrier: return;
        case Kind::kAllReduceOneShot:
        case Kind::kReduce: return copy(slot, plan_.in + from(), length(plan_.bytes));
        case Kind::kAllReduceTwoShot: return publish_two_shot();
        case Kind::kAllGather: return copy(slot, plan_.in + from(), length(plan_.columns.bytes_of(self)));
        case Kind::kGather:
            if (self != plan_.root) copy(slot, plan_.in + from(), length(plan_.columns.bytes_of(self)));
            return;
        case Kind::kBroadcast:
            if (self == plan_.root) copy(slot, plan_.in + from(), length(plan_.bytes));
            return;
        case Kind::kScatter:
            if (self == plan_.root) publish_columns();
            return;
        case Kind::kAllToAll:
            if (at_ == 0) publish_table();
            return publish_columns();
        case Kind::kReduceScatter: return publish_columns();
    }
}

// Whether this rank's own piece passes through its slot too. The piece must be contiguous, which it is not in
// an input of several rows.
bool Call::has_own_in_slot() const {
    return (plan_.kind == Kind::kReduceScatter || plan_.kind == Kind::kAllToAll) && plan_.columns.rows > 1;
}

// Writes the next piece for each rank to the slot, at a multiple of the piece's size.
void Call::publish_columns() {
    const bool with_own = has_own_in_slot();
    unsigned char* slot = region_.slot(region_.rank());
    for (uint32_t r = 0; r < region_.ranks(); ++r) {
        if (r == region_.rank() && !with_own) continue;
        const size_t bytes = length(plan_.columns.bytes_of(r));
        if (bytes > 0) plan_.columns.take(r, plan_.in, slot + r * chunk_, from(), bytes);
    }
}

// Writes the other ranks' shares of this round to the slot, followed by this rank's result of the previous round.
void Call::publish_two_shot() {
    const uint32_t self = region_.rank(), ranks = region_.ranks();
    unsigned char* slot = region_.slot(self);
    for (uint32_t r = 0; r < ranks; ++r) {
        if (r != self) copy(slot + r * chunk_, plan_.in + share_from(at_, r), share_bytes(at_, r));
    }
    if (at_ > 0) copy(slot + ranks * chunk_, plan_.out + share_from(at_ - 1, self), share_bytes(at_ - 1, self));
}

void Call::consume_two_shot() {
    const uint32_t self = region_.rank(), ranks = region_.ranks();
    const size_t start = share_from(at_, self);
    reduce_to(plan_.out + start, plan_.in + start, share_bytes(at_, self), self * chunk_);
    for (uint32_t r = 0; at_ > 0 && r < ranks; ++r) {
        if (r == self) continue;
        copy(plan_.out + share_from(at_ - 1, r), region_.slot(r) + ranks * chunk_, share_bytes(at_ - 1, r));
    }
}

// Combines `bytes` of every rank in rank order: this rank's at `own`, the others' at `slot_offset` of their slots.
void Call::reduce_to(unsigned char* out, const unsigned char* own, size_t bytes, size_t slot_offset) {
    if (bytes == 0) return;
    for (uint32_t r = 0; r < region_.ranks(); ++r) {
        inputs_[r] = r == region_.rank() ? own : region_.slot(r) + slot_offset;
    }
    plan_.kernel(out, inputs_.data(), region_.ranks(), bytes / plan_.element);
}

// Copies every rank's piece into the result.
void Call::consume_columns() {
    for (uint32_t r = 0; r < region_.ranks(); ++r) {
        const size_t bytes = length(plan_.columns.bytes_of(r));
        const unsigned char* piece = r == region_.rank() ? plan_.in + from() : region_.slot(r);
        if (bytes > 0) plan_.columns.put(r, plan_.out, piece, from(), bytes);
    }
}

// Copies the piece for this rank from the root's slot.
void Call::consume_scattered() {
    const uint32_t self = region_.rank();
    const size_t bytes = length(plan_.columns.bytes_of(self));
    if (self == plan_.root) {
        plan_.columns.take(self, plan_.in, plan_.out + from(), from(), bytes);
    } else {
        copy(plan_.out + from(), region_.slot(plan_.root) + self * chunk_, bytes);
    }
}

// Copies the piece for this rank from each rank's slot.
void Call::consume_exchanged() {
    const uint32_t self = region_.rank();
    for (uint32_t r = 0; r < region_.ranks(); ++r) {
        const size_t bytes = length(plan_.out_columns.bytes_of(r));
        if (bytes == 0) continue;
        const unsigned char* piece = region_.slot(r) + self * chunk_;
        if (r == self && !has_own_in_slot()) piece = plan_.in + plan_.columns.starts[self] + from();
        plan_.out_columns.put(r, plan_.out, piece, from(), bytes);
    }
}

void Call::consume() {
    const uint32_t self = region_.rank();
    const size_t bytes = length(plan_.bytes);
    switch (plan_.kind) {
        case Kind::kBarrier: return;
        case Kind::kAllReduceOneShot: return reduce_to(plan_.out + from(), plan_.in + from(), bytes, 0);
        case Kind::kReduce:
            if (self == plan_.root) reduce_to(plan_.out + from(), plan_.in + from(), bytes, 0);
            return;
        case Kind::kAllReduceTwoShot: return consume_two_shot();
        case Kind::kBroadcast:
            if (self != plan_.root) copy(plan_.out + from(), region_.slot(plan_.root), bytes);
            return;
        case Kind::kAllGather: return consume_columns();
        case Kind::kGather:
            if (self == plan_.root) consume_columns();
            return;
        case Kind::kScatter: return consume_scattered();
        case Kind::kAllToAll: return consume_exchanged();
        case Kind::kReduceScatter: {
            const size_t own = length(plan_.columns.bytes_of(self));
            const unsigned char* input = has_own_in_slot() ? region_.slot(self) + self * chunk_
                                                           : plan_.in + plan_.columns.starts[self] + from();
            return reduce_to(plan_.out + from(), input, own, self * chunk_);
        }
    }
}

}  // namespace region
