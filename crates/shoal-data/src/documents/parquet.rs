//! `.parquet`: one document a row, the text in one column. Only that column's pages are read.

use super::Documents;
use crate::error::{Error, Result};
use crate::files::OpenFile;
use crate::source::SourceFile;
use bytes::Bytes;
use parquet::basic::Type;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::ByteArrayType;
use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::reader::{ChunkReader, FileReader, Length};
use parquet::file::serialized_reader::SerializedFileReader;
use std::io::{self, BufReader, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

/// Rows decoded at once. Values share their page's memory, so a batch holds on to the pages it touches;
/// few rows keep that to a page or two even when documents are long.
const BATCH_ROWS: usize = 64;

/// Reads `file` one row group after another. Null rows are passed over.
pub(super) fn read(file: &SourceFile, field: &str, documents: &mut dyn Documents) -> Result<()> {
    let path = &file.path;
    let ranges = Ranges::open(path)?;
    let reader = guarded(path, || SerializedFileReader::new(ranges))?;
    let column = find_column(&reader, path, field)?;

    let mut first_row = 0;
    let groups = reader.num_row_groups();
    for group in 0..groups {
        let opened = guarded(path, || reader.get_row_group(group)?.get_column_reader(column))?;
        let ColumnReader::ByteArrayColumnReader(mut strings) = opened else {
            let (column, found) = (field.into(), "another type in one of its parts".into());
            return Err(Error::NotStringColumn { path: path.clone(), column, found });
        };
        first_row += read_column(&mut strings, path, field, first_row, documents)?;
        documents.advance(file.bytes / groups as u64);
    }
    Ok(())
}

/// Does a piece of the library's work. Damaged pages make it fail, or, in some of its decoders, panic; both
/// become an error here, and the reader in which it happened is not used again.
fn guarded<T>(path: &Path, work: impl FnOnce() -> ParquetResult<T>) -> Result<T> {
    let refuse = |message: String| Error::Parquet { path: path.into(), message };
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done.map_err(|error| refuse(error.to_string())),
        Err(_) => Err(refuse("its pages are damaged".into())),
    }
}

/// The number of the leaf column called `field`, which holds one string or null a row.
fn find_column(reader: &SerializedFileReader<Ranges>, path: &Path, field: &str) -> Result<usize> {
    let columns = reader.metadata().file_metadata().schema_descr().columns();
    let Some(index) = columns.iter().position(|column| column.path().string() == field) else {
        let has = columns.iter().map(|column| column.path().string()).collect();
        return Err(Error::NoColumn { path: path.into(), column: field.into(), has });
    };
    let column = &columns[index];
    let found = match (column.physical_type(), column.max_rep_level()) {
        (Type::BYTE_ARRAY, 0) => return Ok(index),
        (_, 1..) => "lists".into(),
        (other, _) => other.to_string(),
    };
    Err(Error::NotStringColumn { path: path.into(), column: field.into(), found })
}

/// Reads all rows of one row group and says how many there were.
fn read_column(
    column: &mut ColumnReaderImpl<ByteArrayType>,
    path: &Path,
    field: &str,
    first_row: u64,
    documents: &mut dyn Documents,
) -> Result<u64> {
    let mut rows = 0;
    let mut levels = Vec::new();
    let mut values = Vec::new();
    loop {
        levels.clear();
        values.clear();
        let (count, _, _) =
            guarded(path, || column.read_records(BATCH_ROWS, Some(&mut levels), None, &mut values))?;
        if count == 0 {
            return Ok(rows);
        }
        for (place, value) in values.iter().enumerate() {
            let text = str::from_utf8(value.data()).map_err(|_| Error::NotUtf8Row {
                path: path.into(),
                row: first_row + rows + row_of_value(&levels, place),
                column: field.into(),
            })?;
            documents.text(text)?;
            documents.end()?;
        }
        rows += count as u64;
    }
}

/// The row, within its batch, of the value at `place`: nulls have a level below the highest and no value.
fn row_of_value(levels: &[i16], place: usize) -> u64 {
    let highest = levels.iter().max();
    let mut with_value = levels.iter().enumerate().filter(|(_, level)| Some(*level) == highest);
    with_value.nth(place).map_or(place, |(row, _)| row) as u64
}

/// The file as Parquet's reader sees it. A corrupt file asks for ranges that are not there, of any size;
/// they are refused here, before memory is set aside for them.
struct Ranges {
    file: Arc<OpenFile>,
    bytes: u64,
}

impl Ranges {
    fn open(path: &Path) -> Result<Self> {
        let file = OpenFile::open(path)?;
        Ok(Self { bytes: file.len()?, file: Arc::new(file) })
    }
}

impl Length for Ranges {
    fn len(&self) -> u64 {
        self.bytes
    }
}

impl ChunkReader for Ranges {
    type T = BufReader<Cursor>;

    fn get_read(&self, start: u64) -> ParquetResult<Self::T> {
        let file = Arc::clone(&self.file);
        Ok(BufReader::new(Cursor { file, offset: start, end: self.bytes }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> ParquetResult<Bytes> {
        if start.checked_add(length as u64).is_none_or(|end| end > self.bytes) {
            let message = format!("{length} bytes at {start} reach beyond the file's {}", self.bytes);
            return Err(ParquetError::EOF(message));
        }
        let mut bytes = vec![0; length];
        self.file.read_at(&mut bytes, start).map_err(|error| ParquetError::External(Box::new(error)))?;
        Ok(bytes.into())
    }
}

/// A position in the file that moves on as it is read.
struct Cursor {
    file: Arc<OpenFile>,
    offset: u64,
    end: u64,
}

impl Read for Cursor {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end.saturating_sub(self.offset)).unwrap_or(usize::MAX);
        let count = bytes.len().min(left);
        self.file.read_at(&mut bytes[..count], self.offset).map_err(io::Error::other)?;
        self.offset += count as u64;
        Ok(count)
    }
}
