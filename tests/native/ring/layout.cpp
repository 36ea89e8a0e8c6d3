// Prints each word of the ring's layout as the native core has it: table, name, offset, bytes.
#include <cstdio>
#include <initializer_list>

#include RING_HEADER

#define WORD(name, line, type, member) \
    std::printf("FIELDS %s %zu %zu\n", name, offsetof(ring::Header, line) + offsetof(type, member), sizeof(type::member))
#define RECORD(member) \
    std::printf("RECORD_FIELDS %s %zu %zu\n", #member, offsetof(ring::RecordHeader, member), sizeof(ring::RecordHeader::member))

int main() {
    WORD("magic", identity, ring::Identity, magic);
    WORD("version", identity, ring::Identity, version);
    WORD("readers", identity, ring::Identity, readers);
    WORD("data_offset", identity, ring::Identity, data_offset);
    WORD("data_bytes", identity, ring::Identity, data_bytes);
    WORD("generation", identity, ring::Identity, generation);
    WORD("published", writer, ring::WriterLine, published);
    WORD("messages", writer, ring::WriterLine, messages);
    WORD("stamp_ns", writer, ring::WriterLine, stamp_ns);
    WORD("sequence", writer, ring::WriterLine, sequence);
    WORD("closed", writer, ring::WriterLine, closed);
    WORD("filled", writer, ring::WriterLine, filled);
    WORD("space", space, ring::SpaceLine, word);
    WORD("waiting", space, ring::SpaceLine, waiting);
    WORD("consumed", readers, ring::ReaderLine, consumed);
    WORD("reader_messages", readers, ring::ReaderLine, messages);
    WORD("progress_ns", readers, ring::ReaderLine, progress_ns);
    WORD("parked", readers, ring::ReaderLine, parked);
    WORD("state", readers, ring::ReaderLine, state);
    RECORD(payload_bytes);
    RECORD(flags);
    RECORD(tag);
    RECORD(message);
    RECORD(total_bytes);
    std::printf("LINE %zu\nPAGE %zu\nMAX_READERS %u\n", ring::kLine, ring::kPage, ring::kMaxReaders);
    std::printf("ReaderState %u %u %u\n", ring::kAbsent, ring::kAttached, ring::kLeft);
    std::printf("RecordKind %u %u %u %u %u\n", ring::kWhole, ring::kSkip, ring::kPart, ring::kLastPart, ring::kStreamed);
    for (unsigned readers : {1u, 61u, 62u, 1024u}) std::printf("data_offset %u %zu\n", readers, ring::data_offset(readers));
    for (size_t payload : {size_t{0}, size_t{1}, size_t{64}, size_t{65}}) {
        std::printf("record_bytes %zu %zu\n", payload, ring::record_bytes(payload));
    }
}
