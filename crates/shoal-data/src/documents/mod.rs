//! Reading text-like files as a stream of documents, a piece at a time, so that memory does not grow with
//! a file. Each kind of file has its reader; all of them feed one [`Documents`].

mod jsonl;
mod parquet;
mod text;

use crate::error::Result;
use crate::source::{Kind, SourceFile};

/// Where readers put what they find.
pub(crate) trait Documents {
    /// More of the current document.
    fn text(&mut self, piece: &str) -> Result<()>;
    /// The current document is complete; one without any text does not count.
    fn end(&mut self) -> Result<()>;
    /// So many more bytes of the file have been read.
    fn advance(&mut self, bytes: u64);
}

/// Reads every document of `file`; `field` is the field or column that holds the text.
pub(crate) fn read(kind: Kind, file: &SourceFile, field: &str, documents: &mut dyn Documents) -> Result<()> {
    match kind {
        Kind::Text => text::read(file, documents),
        Kind::JsonLines => jsonl::read(file, field, documents),
        Kind::Parquet => parquet::read(file, field, documents),
        Kind::Tokens | Kind::Safetensors | Kind::Pictures => unreachable!("these hold no text"),
    }
}

/// The mark some editors put at the start of a UTF-8 file: no part of the text.
const BYTE_ORDER_MARK: &str = "\u{feff}";
