//! The library's descriptors: opaque objects that are given attributes, finalised, and read from then on.
//! Everything the library refuses comes back with the text it has for it.

use std::ffi::{CStr, c_char, c_void};
use std::fmt;

use cudarc::cudnn::sys;
pub(super) use sys::cudnnBackendAttributeName_t as Name;
pub(super) use sys::cudnnBackendDescriptorType_t as Kind;
use sys::{cudnnBackendAttributeType_t as Type, cudnnStatus_t as Status};

use crate::device::DeviceError;

/// Bytes for the library's explanation of an error.
const EXPLANATION_BYTES: usize = 4096;

/// A call that did not succeed.
#[derive(Debug)]
pub(super) struct Refusal {
    call: &'static str,
    /// The descriptor, and the attribute where there is one.
    what: String,
    status: Status,
    said: String,
}

pub(super) type Result<T = ()> = std::result::Result<T, Refusal>;

impl Refusal {
    /// Nothing was refused, but nothing was proposed either.
    pub(super) fn no_engine() -> Refusal {
        Refusal {
            call: "cudnnBackendGetAttribute",
            what: format!("{:?}, none of them", Name::CUDNN_ATTR_ENGINEHEUR_RESULTS),
            status: Status::CUDNN_STATUS_NOT_SUPPORTED,
            said: explanation(),
        }
    }

    /// Whether the library is well and only has nothing for this graph: a parameter it does not take, a
    /// pattern it does not know, an engine that does not compile here. Otherwise something is broken.
    pub(super) fn is_about_the_graph(&self) -> bool {
        (2000..5000).contains(&(self.status as u32))
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        let Refusal { call, what, status, said } = self;
        write!(out, "{call} of {what}: {status:?} ({said})")
    }
}

impl From<Refusal> for DeviceError {
    fn from(Refusal { call, what, status, said }: Refusal) -> DeviceError {
        DeviceError::Cudnn { call, said: format!("{what}: {status:?} ({said})") }
    }
}

/// What the library says of this thread's last error; nothing where it keeps silent.
fn explanation() -> String {
    let mut text: [c_char; EXPLANATION_BYTES] = [0; EXPLANATION_BYTES];
    // SAFETY: the library writes at most so many bytes, and the last one stays zero.
    unsafe { sys::cudnnGetLastErrorString(text.as_mut_ptr(), EXPLANATION_BYTES - 1) };
    // SAFETY: ends with a zero, as above.
    let said = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy();
    said.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The status of a call, explained; `what` is asked only when it failed.
pub(super) fn check(call: &'static str, what: impl FnOnce() -> String, status: Status) -> Result {
    if status == Status::CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    Err(Refusal { call, what: what(), status, said: explanation() })
}

/// What an attribute may hold.
///
/// # Safety
/// The type is laid out as the library expects of `TYPE`.
pub(super) unsafe trait Value: Copy {
    const TYPE: Type;
}

/// A descriptor as an attribute of another.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Reference(sys::cudnnBackendDescriptor_t);

/// What the library notes about an engine's numbers. Newer libraries have notes that the bindings lack, so
/// this is a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Note(pub(super) u32);

/// An address, of the device or of the host.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Pointer(pub(super) *mut c_void);

// SAFETY: CUDNN_TYPE_INT64 is int64_t.
unsafe impl Value for i64 {
    const TYPE: Type = Type::CUDNN_TYPE_INT64;
}
// SAFETY: CUDNN_TYPE_BOOLEAN is bool, one byte.
unsafe impl Value for bool {
    const TYPE: Type = Type::CUDNN_TYPE_BOOLEAN;
}
// SAFETY: CUDNN_TYPE_FLOAT is float.
unsafe impl Value for f32 {
    const TYPE: Type = Type::CUDNN_TYPE_FLOAT;
}
// SAFETY: the library's own type; likewise below.
unsafe impl Value for sys::cudnnHandle_t {
    const TYPE: Type = Type::CUDNN_TYPE_HANDLE;
}
// SAFETY: as above.
unsafe impl Value for sys::cudnnDataType_t {
    const TYPE: Type = Type::CUDNN_TYPE_DATA_TYPE;
}
// SAFETY: as above.
unsafe impl Value for sys::cudnnPointwiseMode_t {
    const TYPE: Type = Type::CUDNN_TYPE_POINTWISE_MODE;
}
// SAFETY: as above.
unsafe impl Value for sys::cudnnReduceTensorOp_t {
    const TYPE: Type = Type::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE;
}
// SAFETY: as above.
unsafe impl Value for sys::cudnnBackendHeurMode_t {
    const TYPE: Type = Type::CUDNN_TYPE_HEUR_MODE;
}
// SAFETY: as above.
unsafe impl Value for sys::cudnnConvolutionMode_t {
    const TYPE: Type = Type::CUDNN_TYPE_CONVOLUTION_MODE;
}
// SAFETY: a transparent integer of the size of cudnnBackendNumericalNote_t.
unsafe impl Value for Note {
    const TYPE: Type = Type::CUDNN_TYPE_NUMERICAL_NOTE;
}
// SAFETY: a transparent cudnnBackendDescriptor_t.
unsafe impl Value for Reference {
    const TYPE: Type = Type::CUDNN_TYPE_BACKEND_DESCRIPTOR;
}
// SAFETY: a transparent void pointer.
unsafe impl Value for Pointer {
    const TYPE: Type = Type::CUDNN_TYPE_VOID_PTR;
}
// SAFETY: CUDNN_TYPE_CHAR is char.
#[cfg(test)]
unsafe impl Value for u8 {
    const TYPE: Type = Type::CUDNN_TYPE_CHAR;
}

pub(super) struct Descriptor {
    kind: Kind,
    raw: sys::cudnnBackendDescriptor_t,
}

// SAFETY: not bound to a thread; whoever owns it is the only one to use it.
unsafe impl Send for Descriptor {}

impl Descriptor {
    pub(super) fn new(kind: Kind) -> Result<Descriptor> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let status = unsafe { sys::cudnnBackendCreateDescriptor(kind, &mut raw) };
        check("cudnnBackendCreateDescriptor", || format!("{kind:?}"), status)?;
        Ok(Descriptor { kind, raw })
    }

    pub(super) fn set<V: Value>(&mut self, name: Name, values: &[V]) -> Result {
        let (count, at) = (values.len() as i64, values.as_ptr().cast());
        // SAFETY: so many values of the type, which the library copies.
        let status = unsafe { sys::cudnnBackendSetAttribute(self.raw, name, V::TYPE, count, at) };
        check("cudnnBackendSetAttribute", || format!("{:?}, {name:?}", self.kind), status)
    }

    pub(super) fn finalize(&mut self) -> Result {
        // SAFETY: the descriptor lives.
        let status = unsafe { sys::cudnnBackendFinalize(self.raw) };
        check("cudnnBackendFinalize", || format!("{:?}", self.kind), status)
    }

    /// Reads an attribute into `values`, and says how many were written.
    pub(super) fn get<V: Value>(&self, name: Name, values: &mut [V]) -> Result<usize> {
        // SAFETY: room for so many values of the type.
        unsafe { self.read::<V>(name, values.len() as i64, values.as_mut_ptr().cast()) }
    }

    /// How many values an attribute has.
    pub(super) fn count<V: Value>(&self, name: Name) -> Result<usize> {
        // SAFETY: nothing is written. The null is what asks for the number: with an address, and room for
        // none, the answer is that none were written.
        unsafe { self.read::<V>(name, 0, std::ptr::null_mut()) }
    }

    /// # Safety
    /// `at` has room for `room` values.
    unsafe fn read<V: Value>(&self, name: Name, room: i64, at: *mut c_void) -> Result<usize> {
        let mut count = 0;
        // SAFETY: by this function's contract.
        let status = unsafe { sys::cudnnBackendGetAttribute(self.raw, name, V::TYPE, room, &mut count, at) };
        check("cudnnBackendGetAttribute", || format!("{:?}, {name:?}", self.kind), status)?;
        Ok(count.max(0) as usize)
    }

    pub(super) fn reference(&self) -> Reference {
        Reference(self.raw)
    }

    /// Queues an execution plan's work on the handle's stream.
    ///
    /// # Safety
    /// The pack's addresses are those the plan was made for, and may be read and written so.
    pub(super) unsafe fn execute(&self, handle: sys::cudnnHandle_t, pack: &Descriptor) -> Result {
        // SAFETY: by this function's contract; both descriptors live.
        let status = unsafe { sys::cudnnBackendExecute(handle, self.raw, pack.raw) };
        check("cudnnBackendExecute", || format!("{:?}", self.kind), status)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once; what refers to it inside the library holds it itself.
        unsafe { sys::cudnnBackendDestroyDescriptor(self.raw) };
    }
}
