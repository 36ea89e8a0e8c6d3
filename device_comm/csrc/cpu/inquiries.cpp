// Queries about a call that is in progress, or for which the ranks disagreed.
#include "object.hpp"

namespace region {
namespace {

// How many disagreements are kept that no thread has read yet.
constexpr size_t kMostKept = 64;

PyObject* tuple_of(const uint64_t* values, uint32_t count) {
    PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(count));
    for (uint32_t i = 0; tuple != nullptr && i < count; ++i) {
        PyObject* value = PyLong_FromUnsignedLongLong(values[i]);
        if (value == nullptr || PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(i), value) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

// Returns a list of what `entry` returns for each rank, without the ranks for which it returns null and sets no exception.
// The list ends where the region is closed, or has been closed meanwhile.
template <typename Entry>
PyObject* list_of(PyObject* self, Entry entry) {
    Object* object = object_of(self);
    Ref list(PyList_New(0));
    // Making an entry may run finalizers, which may close the region.
    for (uint32_t r = 0; list && !object->is_closed && r < object->region->ranks(); ++r) {
        const Ref item(entry(*object->region, r));
        if (!item && PyErr_Occurred() == nullptr) continue;
        if (!item || PyList_Append(list.get(), item.get()) < 0) return nullptr;
    }
    return list.release();
}

}  // namespace

// missing() -> ranks that have not posted the current step
PyObject* missing(PyObject* self, PyObject*) {
    return list_of(self, [](SharedRegion& shared, uint32_t r) {
        return shared.has_posted(r) ? nullptr : PyLong_FromUnsignedLong(r);
    });
}

// last_calls() -> for each rank (number, kind) of the last call in which it has posted a step, or None
PyObject* last_calls(PyObject* self, PyObject*) {
    return list_of(self, [](SharedRegion& shared, uint32_t r) {
        const View* view = shared.last_view(r);
        if (view == nullptr) return Py_NewRef(Py_None);
        return Py_BuildValue("(KI)", static_cast<unsigned long long>(view->number), static_cast<unsigned>(view->code & 0xFF));
    });
}

void keep_posts(Object* object) {
    SharedRegion& shared = *object->region;
    const uint32_t ranks = shared.ranks();
    try {
        if (object->disagreements == nullptr) object->disagreements = new std::list<Disagreement>();
        std::list<Disagreement> kept(1);
        kept.front().thread = object->owner;
        for (uint32_t r = 0; r < ranks; ++r) {
            Posted posted{shared.posted(r).view, {}, shared.reason(r)};
            if ((posted.view.code & 0xFF) == static_cast<uint64_t>(Kind::kAllToAll)) {
                const auto* table = reinterpret_cast<const uint64_t*>(shared.slot(r) + table_offset(shared));
                posted.widths.assign(table, table + 2 * ranks);
            }
            kept.front().posts.push_back(std::move(posted));
        }
        object->disagreements->splice(object->disagreements->begin(), kept);
        // A thread reads its disagreement at once, unless a handler's exception ends its call before that.
        if (object->disagreements->size() > kMostKept) object->disagreements->pop_back();
    } catch (const std::bad_alloc&) {
        // The call is over on all ranks: the error says that they disagree, without their views.
    }
}

// disagreement() -> for each rank ((number, code, count, detail), (sent, expected) of an exchange or None, reason of a refusal),
// as they were posted for the latest call of this thread for which the ranks disagreed; each is returned once
PyObject* disagreement(PyObject* self, PyObject*) {
    Object* object = object_of(self);
    Ref list(PyList_New(0));
    if (!list || object->disagreements == nullptr) return list.release();
    // Taken out of the object first: what follows may run finalizers, which may make calls of their own.
    std::list<Disagreement> found;
    for (auto each = object->disagreements->begin(); each != object->disagreements->end(); ++each) {
        if (each->thread != PyThread_get_thread_ident()) continue;
        found.splice(found.begin(), *object->disagreements, each);
        break;
    }
    if (found.empty()) return list.release();
    for (const Posted& posted : found.front().posts) {
        const View& view = posted.view;
        const uint64_t numbers[] = {view.number, view.code, view.count, view.detail};
        const auto half = static_cast<uint32_t>(posted.widths.size() / 2);
        PyObject* widths = half == 0 ? Py_NewRef(Py_None)
                                     : Py_BuildValue("(NN)", tuple_of(posted.widths.data(), half),
                                                     tuple_of(posted.widths.data() + half, half));
        PyObject* reason = PyBytes_FromStringAndSize(posted.reason.data(), static_cast<Py_ssize_t>(posted.reason.size()));
        const Ref item(Py_BuildValue("(NNN)", tuple_of(numbers, 4), widths, reason));
        if (!item || PyList_Append(list.get(), item.get()) < 0) return nullptr;
    }
    return list.release();
}

}  // namespace region
