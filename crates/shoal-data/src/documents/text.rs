//! `.txt`: the whole file is one document.

use super::{BYTE_ORDER_MARK, Documents};
use crate::error::{Error, Result};
use crate::files::BLOCK_BYTES;
use crate::source::SourceFile;
use std::fs::File;
use std::io::Read;

/// Reads `file` block by block. A character may straddle two blocks: its first bytes wait for the rest.
pub(super) fn read(file: &SourceFile, documents: &mut dyn Documents) -> Result<()> {
    let path = &file.path;
    let mut reader = File::open(path).map_err(|cause| Error::io("open", path, cause))?;
    let mut block = vec![0; BLOCK_BYTES];
    let mut carried = 0;
    let mut offset = 0;
    loop {
        let count = reader.read(&mut block[carried..]).map_err(|cause| Error::io("read", path, cause))?;
        let filled = carried + count;
        let at_end = count == 0;
        let valid = match str::from_utf8(&block[..filled]) {
            Ok(_) => filled,
            Err(error) if error.error_len().is_none() && !at_end => error.valid_up_to(),
            Err(error) => {
                let offset = offset + error.valid_up_to() as u64;
                return Err(Error::NotUtf8 { path: path.clone(), offset });
            }
        };
        let piece = str::from_utf8(&block[..valid]).unwrap_or_default();
        let piece = if offset == 0 { piece.strip_prefix(BYTE_ORDER_MARK).unwrap_or(piece) } else { piece };
        documents.text(piece)?;
        documents.advance(count as u64);
        if at_end {
            return documents.end();
        }
        offset += valid as u64;
        block.copy_within(valid..filled, 0);
        carried = filled - valid;
    }
}
