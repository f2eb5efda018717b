//! An owned piece of a device's memory holding elements of one kind. It carries no shape: the operation
//! that uses it says how it is laid out, and checks that the length fits.

use std::ops::Range;
use std::sync::Arc;

use crate::memory::{Arena, Block, MemoryError};

/// What a tensor's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// Four bytes: an f32, or an i32 where the operation says so.
    F32,
    /// Two bytes: the upper half of an f32.
    Bf16,
    /// Two bytes: IEEE half precision.
    F16,
}

impl Element {
    pub const fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::Bf16 | Element::F16 => 2,
        }
    }
}

pub struct Tensor {
    block: Arc<Block>,
    element: Element,
    elements: usize,
}

// SAFETY: a tensor owns its block like a boxed slice, or shares it with others that only read.
unsafe impl Send for Tensor {}
// SAFETY: shared access is read-only.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// Takes room for `elements` numbers of four bytes; what they hold is unspecified until written.
    pub fn new(arena: &Arc<Arena>, who: &str, elements: usize) -> Result<Tensor, MemoryError> {
        Tensor::of(arena, who, Element::F32, elements)
    }

    /// The same for elements of any kind.
    pub fn of(
        arena: &Arc<Arena>,
        who: &str,
        element: Element,
        elements: usize,
    ) -> Result<Tensor, MemoryError> {
        Ok(Tensor { block: Arc::new(arena.take(who, element.bytes() * elements)?), element, elements })
    }

    pub fn zeros(arena: &Arc<Arena>, who: &str, elements: usize) -> Result<Tensor, MemoryError> {
        let mut tensor = Tensor::new(arena, who, elements)?;
        tensor.floats_mut().fill(0.0);
        Ok(tensor)
    }

    pub fn from_floats(arena: &Arc<Arena>, who: &str, values: &[f32]) -> Result<Tensor, MemoryError> {
        let mut tensor = Tensor::new(arena, who, values.len())?;
        tensor.floats_mut().copy_from_slice(values);
        Ok(tensor)
    }

    pub fn from_integers(arena: &Arc<Arena>, who: &str, values: &[i32]) -> Result<Tensor, MemoryError> {
        let mut tensor = Tensor::new(arena, who, values.len())?;
        tensor.integers_mut().copy_from_slice(values);
        Ok(tensor)
    }

    /// The same memory once more, given back when the last has let go of it. From here on it is only read.
    pub fn share(&self) -> Tensor {
        Tensor { block: Arc::clone(&self.block), element: self.element, elements: self.elements }
    }

    /// The same memory for a processor that plays a device: see [`Block::lend`].
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn lend(&self) -> Tensor {
        // SAFETY: by this function's contract.
        let block = unsafe { self.block.lend() };
        Tensor { block: Arc::new(block), element: self.element, elements: self.elements }
    }

    pub fn len(&self) -> usize {
        self.elements
    }

    pub fn element(&self) -> Element {
        self.element
    }

    pub fn is_empty(&self) -> bool {
        self.elements == 0
    }

    /// Bytes counted against the budget.
    pub fn bytes(&self) -> usize {
        self.block.length()
    }

    /// Where it lies among the device's memory: two tensors at the same place are so at different times.
    pub fn place(&self) -> u64 {
        self.block.start() as u64
    }

    /// Whether the host may read and write it where it lies.
    pub fn is_on_host(&self) -> bool {
        self.block.on_host()
    }

    /// The first element's address, on whichever device it is.
    pub(crate) fn address(&self) -> *mut u8 {
        self.block.start()
    }

    fn assert_on_host(&self) {
        assert_eq!(self.element, Element::F32, "the host computes on elements of four bytes");
        assert!(self.block.on_host(), "the host reads a device's memory: go through Device::host_floats");
    }

    /// What is shared is not written. (A tensor that is alone stays so: only its owner can share it.)
    pub(crate) fn assert_alone(&self) {
        assert_eq!(Arc::strong_count(&self.block), 1, "a tensor that others read is not written");
    }

    /// # Panics
    /// If the memory is not the host's; likewise below.
    pub fn floats(&self) -> &[f32] {
        self.assert_on_host();
        // SAFETY: the block is at least 4 * elements bytes, aligned, initialised, and any bits are an f32.
        unsafe { std::slice::from_raw_parts(self.block.start().cast(), self.elements) }
    }

    pub fn floats_mut(&mut self) -> &mut [f32] {
        self.assert_on_host();
        self.assert_alone();
        // SAFETY: as for `floats`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.block.start().cast(), self.elements) }
    }

    /// The bytes of some elements.
    ///
    /// # Panics
    /// If there are not so many elements, or the memory is not the host's.
    pub(crate) fn bytes_of(&self, elements: Range<usize>) -> &[u8] {
        let (start, length) = self.byte_range(elements);
        // SAFETY: the block is at least as long as the tensor, whose memory is initialised and of plain numbers.
        unsafe { std::slice::from_raw_parts(self.block.start().add(start), length) }
    }

    pub(crate) fn bytes_of_mut(&mut self, elements: Range<usize>) -> &mut [u8] {
        self.assert_alone();
        let (start, length) = self.byte_range(elements);
        // SAFETY: as for `bytes_of`, any bits are an element, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.block.start().add(start), length) }
    }

    /// The parts of some elements' bytes, from the first of them on, that a device can copy by itself; none where it cannot.
    pub(crate) fn locked_runs(&self, elements: Range<usize>) -> Option<Vec<Range<usize>>> {
        let (start, length) = self.byte_range(elements);
        let mut runs = self.block.locked_runs(start..start + length)?;
        runs.iter_mut().for_each(|run| *run = run.start - start..run.end - start);
        Some(runs)
    }

    /// Where the bytes of some elements begin, and how many they are.
    fn byte_range(&self, elements: Range<usize>) -> (usize, usize) {
        assert!(self.block.on_host(), "the host reads a device's memory: go through Device::host_bytes");
        let Range { start, end } = elements;
        assert!(start <= end && end <= self.elements, "elements {start}..{end} of {}", self.elements);
        (start * self.element.bytes(), (end - start) * self.element.bytes())
    }

    pub fn integers(&self) -> &[i32] {
        self.assert_on_host();
        // SAFETY: as for `floats`; any bits are an i32.
        unsafe { std::slice::from_raw_parts(self.block.start().cast(), self.elements) }
    }

    pub fn integers_mut(&mut self) -> &mut [i32] {
        self.assert_on_host();
        self.assert_alone();
        // SAFETY: as for `integers`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.block.start().cast(), self.elements) }
    }
}
