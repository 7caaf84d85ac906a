/* The Python module. Functions take arrays through the buffer protocol and release Python's lock while they work. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

/* CPython exports this function, but does not declare it for the stable ABI. */
int _PyBytes_Resize(PyObject **bytes, Py_ssize_t size);

#include "images.h"
#include "samples.h"
#include "scratch.h"

/* decode_jpegs(files, plans, out, height, width, numbers, board) -> bytes, one result of decode_jpeg per file.
 * `numbers` is None for uint8, empty for float32 divided by 255, or 6 floats: scale and shift of each channel. */
static PyObject *decode_jpegs(PyObject *self, PyObject *args) {
    PyObject *files, *result = NULL;
    Py_buffer plans, out, numbers = {0}, board, *views = NULL;
    int height, width;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!y*w*iiz*w*", &PyList_Type, &files, &plans, &out, &height, &width, &numbers, &board)) return NULL;
    Py_ssize_t num = PyList_Size(files), opened = 0;
    const int is_float = numbers.obj != NULL, factors = is_float && numbers.len == 6 * sizeof(float);
    const size_t each = (size_t)height * width * 3 * (is_float ? sizeof(float) : 1);
    Numbers form = {.divides = !factors};
    if (factors) memcpy(form.scale, numbers.buf, sizeof form.scale), memcpy(form.shift, (char *)numbers.buf + sizeof form.scale, sizeof form.shift);
    const Plan *plan = plans.buf;
    int fits = height > 0 && width > 0 && height <= 1 << 14 && width <= 1 << 14 && out.len % each == 0 && (size_t)board.len >= 2 * sizeof(int64_t) &&
               plans.len == num * (Py_ssize_t)sizeof(Plan) && (!numbers.obj || numbers.len == 0 || factors);
    for (Py_ssize_t i = 0; fits && i < num; i++) fits = plan[i].row >= 0 && (size_t)plan[i].row < out.len / each;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "decode_jpegs: the sizes of the arguments do not fit together");
        goto end;
    }
    views = PyMem_Calloc(num ? num : 1, sizeof *views);
    result = views ? PyBytes_FromStringAndSize(NULL, num) : PyErr_NoMemory();
    for (; result && opened < num; opened++)
        if (PyObject_GetBuffer(PyList_GetItem(files, opened), &views[opened], PyBUF_SIMPLE)) Py_CLEAR(result);
    if (result) {
        char *verdicts = PyBytes_AsString(result);
        volatile int64_t *slot = board.buf;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < num; i++) {
            slot[1] = plan[i].position;
            verdicts[i] = (char)decode_jpeg(views[i].buf, views[i].len, &plan[i], height, width, is_float ? &form : NULL, (char *)out.buf + plan[i].row * each);
        }
        Py_END_ALLOW_THREADS
    }
end:
    while (opened > 0) PyBuffer_Release(&views[--opened]);
    PyMem_Free(views);
    PyBuffer_Release(&plans), PyBuffer_Release(&out), PyBuffer_Release(&board);
    if (numbers.obj) PyBuffer_Release(&numbers);
    return result;
}

#define MOST_SAMPLE (1 << 20) /* bytes; a larger sample is read in Python */

/* Samples are read in groups of this size, which stay in the CPU cache until they are split into fields. */
#define GROUP_BYTES (256 << 10)

/* If a sample is read apart, its first field of this size or more is read straight into its Python value. */
#define LARGE_BYTES (16 << 10)
#define APART_BYTES (32 << 10)  /* a sample that is larger, or has a larger guard, is read apart */
#define HEAD_BYTES 4096         /* read first of a sample, to find the large field */
#define REST_BYTES (16 << 10)   /* most bytes of a sample without its large field, with the next block */

/* A shard: its descriptor, the offsets of its samples, and 1 or 0 for each offset: 1 if the samples before and after it
 * are known to have different keys. */
typedef struct {
    int fd;
    Py_buffer offsets, edges;
} Shard;

/* Open the buffers of a shard, a tuple (descriptor, offsets, edges). Returns 0 with an exception if it is none. */
static int open_shard(PyObject *tuple, Shard *shard) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 3) {
        PyErr_SetString(PyExc_TypeError, "read_samples: a shard is a tuple of 3");
        return 0;
    }
    shard->fd = (int)PyLong_AsLong(PyTuple_GetItem(tuple, 0));
    return !PyErr_Occurred() && !PyObject_GetBuffer(PyTuple_GetItem(tuple, 1), &shard->offsets, PyBUF_SIMPLE) &&
           !PyObject_GetBuffer(PyTuple_GetItem(tuple, 2), &shard->edges, PyBUF_WRITABLE);
}

/* The place of a sample in its shard and in the memory of its group. If the start of a sample is not verified, the
 * sample before it is read too, as its guard: the guard's members must end at that start. The guard is stored before
 * `at`, unless the sample is read apart. */
typedef struct {
    int fd;
    int64_t start;
    int32_t at, size;      /* offset of the sample in memory, and its bytes */
    int32_t guard;         /* bytes of the guard; 0 without one */
    int joins;             /* the sample follows the previous one in the shard and in memory */
    unsigned char *edges;  /* 1 for a verified start, 1 for a verified end */
    PyObject *value;       /* bytes of the sample's size for its large field, if read apart; else NULL */
    char *value_data;
    uint8_t *own;          /* memory of a sample that is read apart but not around one large field; else NULL */
} Place;

/* Find the place of sample `number` of a shard. Returns 0 if the reader in Python has to read the sample. */
static int find_place(const Shard *shard, int64_t number, Place *place) {
    const int64_t *starts = shard->offsets.buf, num = shard->offsets.len / (int64_t)sizeof(int64_t) - 1;
    if (shard->fd < 0 || number < 0 || number >= num || shard->edges.len != num + 1) return 0;
    place->fd = shard->fd, place->start = starts[number], place->edges = (unsigned char *)shard->edges.buf + number;
    int64_t size = starts[number + 1] - starts[number], guard = place->edges[0] ? 0 : number ? starts[number] - starts[number - 1] : -1;
    place->size = (int32_t)size, place->guard = (int32_t)guard;
    return size > 0 && size <= MOST_SAMPLE && guard >= 0 && guard <= MOST_SAMPLE && place->start >= guard;
}

/* Read a sample and the next block into `memory`, without the data of the first large field. The data is read into
 * `value`, or is not read if `value` is NULL. Returns 0 if there is no large field, or more than REST_BYTES without its
 * data. */
static int read_around(int fd, int64_t start, int32_t sample, char *value, uint8_t *memory, Hole *hole) {
    const ssize_t size = sample + BLOCK, head = size < HEAD_BYTES ? size : HEAD_BYTES;
    if (pread(fd, memory, head, start) != head || !find_large(memory, (int32_t)head, LARGE_BYTES, hole)) return 0;
    const ssize_t after = (ssize_t)hole->at + hole->size, rest = size - after;
    if (rest < BLOCK || hole->at + rest > REST_BYTES) return 0;
    if (!value) return pread(fd, memory + hole->at, rest, start + after) == rest;
    struct iovec parts[] = {{memory, hole->at}, {value, hole->size}, {memory + hole->at, rest}};
    return preadv(fd, parts, 3, start) == size;
}

/* Read one sample and find its members. If `read_around` fails, the sample is read into `*own`, which the caller frees.
 * Returns 0 if the reader in Python has to read the sample. */
static int read_apart(int fd, int64_t start, int32_t size, char *value, uint8_t *memory, uint8_t **own, Members *members) {
    Hole hole = {0, 0};
    if (read_around(fd, start, size, value, memory, &hole)) return find_members(memory, size, hole, members);
    *own = malloc((size_t)size + BLOCK);
    return *own && pread(fd, *own, size + BLOCK, start) == size + BLOCK && find_members(*own, size, (Hole){0, 0}, members);
}

static int read_place_apart(Place *place, uint8_t *memory, Members *members) {
    if (place->guard) {
        Members before;
        uint8_t *own = NULL;
        int is_plain = read_apart(place->fd, place->start - place->guard, place->guard, NULL, memory, &own, &before);
        free(own);
        if (!is_plain) return 0;
    }
    return read_apart(place->fd, place->start, place->size, place->value_data, memory, &place->own, members);
}

/* Read the samples of a group into `memory` and find their members. Returns 0 if the reader in Python has to read them.
 * Needs no Python lock. */
static int read_group(Place *places, Members *members, Py_ssize_t num, uint8_t *memory) {
    const Hole none = {0, 0};
    for (Py_ssize_t i = 0; i < num;) {
        Py_ssize_t next = i + 1;
        if (places[i].value) {
            if (!read_place_apart(&places[i], memory + places[i].at, &members[i])) return 0;
            i = next;
            continue;
        }
        while (next < num && places[next].joins) next++;
        uint8_t *to = memory + places[i].at - places[i].guard;
        ssize_t size = places[next - 1].at + places[next - 1].size + BLOCK - (places[i].at - places[i].guard);
        if (pread(places[i].fd, to, size, places[i].start - places[i].guard) != size) return 0;
        if (places[i].guard && !find_members(to, places[i].guard, none, &members[i])) return 0;
        for (; i < next; i++)
            if (!find_members(memory + places[i].at, places[i].size, none, &members[i])) return 0;
    }
    return 1;
}

/* Return the field names of a sample in lower case. Returns NULL without an exception if a name begins with `__` or
 * comes twice. */
static PyObject *field_names(const Members *members) {
    PyObject *names = PyTuple_New(members->num);
    for (int f = 0; names && f < members->num; f++) {
        char text[BLOCK];
        const uint8_t *name = members->name[f];
        for (int i = 0; i < members->name_size[f]; i++) text[i] = name[i] >= 'A' && name[i] <= 'Z' ? name[i] + 32 : name[i];
        PyObject *lowered = PyUnicode_FromStringAndSize(text, members->name_size[f]);
        if (!lowered || PyTuple_SetItem(names, f, lowered)) Py_CLEAR(names);
        int breaks = members->name_size[f] > 1 && text[0] == '_' && text[1] == '_';
        for (int g = 0; names && g < f; g++) breaks |= PyUnicode_Compare(PyTuple_GetItem(names, g), lowered) == 0;
        if (breaks) Py_CLEAR(names);
    }
    return names;
}

/* The fields of the first sample. All samples must have the same field names. */
typedef struct {
    Members members;
    uint8_t names[MOST_FIELDS][BLOCK];
} First;

static void keep_first(First *first, const Members *members) {
    first->members = *members;
    for (int f = 0; f < members->num; f++) memcpy(first->names[f], members->name[f], members->name_size[f]);
}

static int is_alike(const First *first, const Members *members) {
    if (members->num != first->members.num) return 0;
    for (int f = 0; f < members->num; f++) {
        if (members->name_size[f] != first->members.name_size[f]) return 0;
        if (memcmp(first->names[f], members->name[f], members->name_size[f])) return 0;
    }
    return 1;
}

/* Return a tuple of `num` lists with `size` unset items. */
static PyObject *empty_columns(int num, Py_ssize_t size) {
    PyObject *columns = PyTuple_New(num);
    for (int f = 0; columns && f < num; f++) {
        PyObject *column = PyList_New(size);
        if (!column || PyTuple_SetItem(columns, f, column)) Py_CLEAR(columns);
    }
    return columns;
}

/* Store key and fields of sample `i`. Returns 1, or 0 with an exception. */
static int store(PyObject *keys, PyObject *columns, Py_ssize_t i, Place *place, const Members *members) {
    PyObject *key = PyUnicode_FromStringAndSize((const char *)members->key, members->key_size);
    if (!key || PyList_SetItem(keys, i, key)) return 0;
    for (int f = 0; f < members->num; f++) {
        PyObject *data = NULL;
        if (members->data[f])
            data = PyBytes_FromStringAndSize((const char *)members->data[f], members->data_size[f]);
        else {
            data = place->value, place->value = NULL;
            if (_PyBytes_Resize(&data, members->data_size[f])) return 0;
        }
        if (!data || PyList_SetItem(PyTuple_GetItem(columns, f), i, data)) return 0;
    }
    return 1;
}

static void free_place(Place *place) {
    Py_CLEAR(place->value);
    free(place->own), place->own = NULL;
}

/* read_samples(shards, rows, numbers) -> (keys, names, columns), or None if the reader in Python has to read them.
 * Sample i is sample `numbers[i]` of the shard `shards[rows[i]]`. */
static PyObject *read_samples(PyObject *self, PyObject *args) {
    PyObject *tuples, *keys = NULL, *names = NULL, *columns = NULL, *result = NULL;
    Py_buffer rows, numbers;
    First first;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!y*y*", &PyList_Type, &tuples, &rows, &numbers)) return NULL;
    const Py_ssize_t num_shards = PyList_Size(tuples), num = numbers.len / (Py_ssize_t)sizeof(int64_t);
    const int64_t *row = rows.buf, *wanted = numbers.buf;
    Shard *shards = PyMem_Calloc(num_shards + 1, sizeof *shards);
    Place *places = PyMem_Calloc(num + 1, sizeof *places);
    Members *members = PyMem_Calloc(num + 1, sizeof *members);
    uint8_t *memory = scratch(GROUP_BYTES + 2 * (MOST_SAMPLE + BLOCK));
    keys = PyList_New(num);
    if (!shards || !places || !members || !memory || !keys) {
        PyErr_NoMemory();
        goto end;
    }
    int plain = num > 0, fits = rows.len == numbers.len;
    for (Py_ssize_t i = 0; fits && i < num; i++) fits = row[i] >= 0 && row[i] < num_shards;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "read_samples: each number needs the row of a shard");
        goto end;
    }
    for (Py_ssize_t i = 0; i < num_shards; i++)
        if (!open_shard(PyList_GetItem(tuples, i), &shards[i])) goto end;
    for (Py_ssize_t done = 0, stop; done < num; done = stop) {
        int32_t used = 0;
        for (stop = done; stop < num && used < GROUP_BYTES && plain; stop++) {
            Place *place = &places[stop];
            plain = find_place(&shards[row[stop]], wanted[stop], place);
            if (plain && (place->size > APART_BYTES || place->guard > APART_BYTES)) {
                place->value = PyBytes_FromStringAndSize(NULL, place->size);
                if (!place->value) goto end;
                place->value_data = PyBytes_AsString(place->value);
                place->at = used;
                used += REST_BYTES;
                continue;
            }
            place->joins = stop > done && !places[stop - 1].value && row[stop] == row[stop - 1] && wanted[stop] == wanted[stop - 1] + 1;
            if (place->joins) place->guard = 0, used -= BLOCK;
            place->at = used + place->guard;
            used = place->at + place->size + BLOCK;
        }
        if (plain) {
            Py_BEGIN_ALLOW_THREADS
            plain = read_group(places + done, members + done, stop - done, memory);
            Py_END_ALLOW_THREADS
            /* If the end of a sample is not verified, the header after it has to be plain too. */
            for (Py_ssize_t i = done; i < stop && plain; i++) plain = places[i].edges[1] || members[i].is_followed;
        }
        if (plain && !done) {
            keep_first(&first, &members[0]);
            names = field_names(&members[0]);
            plain = names != NULL;
            columns = names ? empty_columns(members[0].num, num) : NULL;
            if (PyErr_Occurred()) goto end;
        }
        for (Py_ssize_t i = done; i < stop && plain; i++) {
            plain = is_alike(&first, &members[i]);
            if (plain && !store(keys, columns, i, &places[i], &members[i])) goto end;
            free_place(&places[i]);
            places[i].edges[0] = places[i].edges[1] = 1;
        }
        if (!plain) break;
    }
    result = plain ? PyTuple_Pack(3, keys, names, columns) : Py_NewRef(Py_None);
end:
    for (Py_ssize_t i = 0; places && i < num; i++) free_place(&places[i]);
    for (Py_ssize_t i = 0; shards && i < num_shards; i++) PyBuffer_Release(&shards[i].offsets), PyBuffer_Release(&shards[i].edges);
    Py_XDECREF(keys), Py_XDECREF(names), Py_XDECREF(columns);
    PyMem_Free(shards), PyMem_Free(places), PyMem_Free(members);
    PyBuffer_Release(&rows), PyBuffer_Release(&numbers);
    return result;
}

static PyObject *use_vectors(PyObject *self, PyObject *allow) {
    (void)self;
    int wanted = PyObject_IsTrue(allow);
    return wanted < 0 ? NULL : PyBool_FromLong(choose_vectors(wanted));
}

static PyMethodDef functions[] = {
    {"decode_jpegs", decode_jpegs, METH_VARARGS, NULL},
    {"read_samples", read_samples, METH_VARARGS, NULL},
    {"use_vectors", use_vectors, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

/* wdskit uses only a module with its own interface number. Raise it when a function's arguments or results change. */
#define INTERFACE 4

static int execute(PyObject *module) {
    choose_vectors(1);
    return PyModule_AddIntConstant(module, "INTERFACE", INTERFACE);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, functions, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
