// Prints the layout of the status page as the native core has it: table, offset, bytes, number; then word, offset, bytes.
#include <cstdio>

#include PAGE_HEADER

#define TABLE(name) \
    std::printf(#name " %zu %zu %zu\n", offsetof(status::Page, name), sizeof(status::Page::name[0]), \
                sizeof(status::Page::name) / sizeof(status::Page::name[0]))
#define WORD(table, type, name, member) \
    std::printf(#table "." name " %zu %zu\n", offsetof(status::type, member), sizeof(status::type::member))
#define SAME(table, type, member) WORD(table, type, #member, member)
#define SECOND(name, member)                                                                                  \
    std::printf("lanes." name " %zu %zu\n", offsetof(status::LaneRecord, call) + offsetof(status::LaneCall, member), \
                sizeof(status::LaneCall::member))

int main() {
    std::printf("header %zu %zu 1\n", offsetof(status::Page, header), offsetof(status::Page, groups));
    TABLE(groups);
    TABLE(queues);
    TABLE(lanes);
    TABLE(counters);
    TABLE(records);
    std::printf("page %zu\n", sizeof(status::Page));
    std::printf("codes %llx %u %u %u %u\n", static_cast<unsigned long long>(status::kMagic), status::kVersion, status::kBuckets,
                status::kNobody, status::kKinds);
    SAME(header, Header, magic);
    SAME(header, Header, version);
    SAME(header, Header, clock);
    SAME(header, Header, page_bytes);
    SAME(header, Header, ticks);
    SAME(header, Header, monotonic_ns);
    SAME(header, Header, rate);
    SAME(header, Header, realtime_ns);
    SAME(header, Header, pid);
    SAME(header, Header, start_ticks);
    SAME(header, Header, pid_namespace);
    SAME(header, Header, time_namespace);
    SAME(header, Header, boot_id);
    SAME(header, Header, hostname);
    SAME(header, Header, rank);
    SAME(header, Header, world_size);
    SAME(header, Header, stack_signal);
    SAME(header, Header, refused);
    SAME(header, Header, records);
    SAME(groups, GroupRecord, sequence);
    SAME(groups, GroupRecord, state);
    SAME(groups, GroupRecord, epoch);
    SAME(groups, GroupRecord, rank);
    SAME(groups, GroupRecord, world_size);
    SAME(groups, GroupRecord, reserved);
    SAME(groups, GroupRecord, created_ns);
    SAME(groups, GroupRecord, name);
    SAME(groups, GroupRecord, ranks);
    SAME(groups, GroupRecord, cause);
    SAME(queues, QueueRecord, sequence);
    SAME(queues, QueueRecord, state);
    SAME(queues, QueueRecord, inode);
    SAME(queues, QueueRecord, offset);
    SAME(queues, QueueRecord, reader);
    SAME(queues, QueueRecord, descriptor);
    SAME(queues, QueueRecord, name);
    SAME(lanes, LaneName, sequence);
    SAME(lanes, LaneName, group);
    SAME(lanes, LaneName, plane);
    SAME(lanes, LaneName, algorithm);
    SECOND("call_sequence", sequence);
    SECOND("state", state);
    SECOND("kind", kind);
    SECOND("dtype", dtype);
    SECOND("op", op);
    SECOND("number", number);
    SECOND("count", count);
    SECOND("begin", begin);
    SECOND("end", end);
    SECOND("detail", detail);
    SECOND("nbytes", nbytes);
    SECOND("root", root);
    SECOND("call_reserved", reserved);
    SAME(counters, CounterRecord, sequence);
    SAME(counters, CounterRecord, lane);
    SAME(counters, CounterRecord, kind);
    SAME(counters, CounterRecord, reserved);
    SAME(counters, CounterRecord, calls);
    SAME(counters, CounterRecord, errors);
    SAME(counters, CounterRecord, nbytes);
    SAME(counters, CounterRecord, waited_ns);
    SAME(counters, CounterRecord, last);
    SAME(counters, CounterRecord, late_ns);
    SAME(counters, CounterRecord, sleeps);
    SAME(counters, CounterRecord, polled_ns);
    SAME(counters, CounterRecord, waits);
    SAME(records, CallRecord, commit);
    SAME(records, CallRecord, number);
    SAME(records, CallRecord, count);
    SAME(records, CallRecord, begin);
    SAME(records, CallRecord, end);
    SAME(records, CallRecord, lane);
    SAME(records, CallRecord, last);
    SAME(records, CallRecord, kind);
    SAME(records, CallRecord, dtype);
    SAME(records, CallRecord, op);
    SAME(records, CallRecord, outcome);
    SAME(records, CallRecord, root);
    SAME(records, CallRecord, detail);
    SAME(records, CallRecord, waited_ns);
    SAME(records, CallRecord, late_ns);
}
