//! Samples that are rows of `.safetensors` files: inputs and labels as they were stored, nothing packed.

use crate::IGNORED;
use crate::error::{Error, Result};
use crate::files::OpenFile;
use crate::tensors::{self, Matrix};
use std::path::Path;

/// One file's rows.
#[derive(Debug)]
struct RowFile {
    file: OpenFile,
    tokens: Matrix,
    /// Labels of their own; without them, a row's labels are its tokens one further on.
    labels: Option<Matrix>,
    /// The number of its first row among all files'.
    first: u64,
}

/// The rows of one or more files, in order.
#[derive(Debug)]
pub(crate) struct Rows {
    files: Vec<RowFile>,
    pub rows: u64,
    /// Tokens stored, those that are never an input included.
    pub tokens: u64,
    sequence: usize,
    vocabulary: usize,
}

impl Rows {
    pub fn new(sequence: usize, vocabulary: usize) -> Self {
        Self { files: Vec::new(), rows: 0, tokens: 0, sequence, vocabulary }
    }

    /// Appends the rows of the file at `path`.
    pub fn append(&mut self, path: &Path) -> Result<()> {
        let file = OpenFile::open(path)?;
        let (metadata, start) = tensors::read_header(&file)?;
        let Some(info) = metadata.info("tokens") else {
            return Err(Error::NoTokens { path: path.into(), has: metadata.offset_keys() });
        };
        let tokens = tensors::matrix(&file, "tokens", info, start)?;
        let labels = metadata.info("labels");
        let labels = labels.map(|info| tensors::matrix(&file, "labels", info, start)).transpose()?;
        self.require_fit(path, &tokens, labels.as_ref())?;

        self.files.push(RowFile { file, tokens, labels, first: self.rows });
        self.rows += tokens.rows as u64;
        self.tokens += tokens.rows as u64 * tokens.columns as u64;
        Ok(())
    }

    /// Refuses rows that are no samples of `sequence` tokens.
    fn require_fit(&self, path: &Path, tokens: &Matrix, labels: Option<&Matrix>) -> Result<()> {
        let sequence = self.sequence;
        let wrong = |tensor, expected, found, sequence: Option<usize>| {
            let sequence = sequence.filter(|&sequence| sequence > 0);
            Err(Error::RowLength { path: path.into(), tensor, expected, found, sequence })
        };
        let Some(labels) = labels else {
            if tokens.columns != sequence + 1 {
                let expected = format!("data.sequence + 1 = {}", sequence + 1);
                return wrong("tokens", expected, tokens.columns, tokens.columns.checked_sub(1));
            }
            return Ok(());
        };
        if labels.columns != sequence {
            let expected = format!("data.sequence = {sequence}");
            return wrong("labels", expected, labels.columns, Some(labels.columns));
        }
        if tokens.columns != sequence && tokens.columns != sequence + 1 {
            let expected = format!("data.sequence = {sequence}, or one more");
            return wrong("tokens", expected, tokens.columns, None);
        }
        if tokens.rows != labels.rows {
            return Err(Error::RowCounts { path: path.into(), tokens: tokens.rows, labels: labels.rows });
        }
        Ok(())
    }

    /// Whether every file has labels of its own.
    pub fn labelled(&self) -> bool {
        self.files.iter().all(|file| file.labels.is_some())
    }

    /// Whether row `index` has labels of its own.
    pub fn has_labels(&self, index: u64) -> bool {
        self.file_of(index).labels.is_some()
    }

    fn file_of(&self, index: u64) -> &RowFile {
        assert!(index < self.rows, "a row beyond the last");
        let after = self.files.partition_point(|file| file.first <= index);
        &self.files[after - 1]
    }

    /// Reads row `index`.
    pub fn read(&self, index: u64, inputs: &mut [i32], labels: &mut [i32]) -> Result<()> {
        let file = self.file_of(index);
        let row = index - file.first;
        let mut ids = Vec::new();
        match &file.labels {
            None => {
                self.read_row(file, &file.tokens, row, self.sequence + 1, "tokens", &mut ids)?;
                fill(inputs, &ids[..self.sequence]);
                fill(labels, &ids[1..]);
            }
            Some(stored) => {
                self.read_row(file, &file.tokens, row, self.sequence, "tokens", &mut ids)?;
                fill(inputs, &ids);
                self.read_row(file, stored, row, self.sequence, "labels", &mut ids)?;
                fill(labels, &ids);
            }
        }
        Ok(())
    }

    /// Replaces `ids` by the first `count` of a row, each within the vocabulary (or, if a label, ignored).
    fn read_row(
        &self,
        file: &RowFile,
        matrix: &Matrix,
        row: u64,
        count: usize,
        tensor: &str,
        ids: &mut Vec<i64>,
    ) -> Result<()> {
        let width = matrix.integer.width();
        let mut bytes = vec![0; count * width];
        file.file.read_at(&mut bytes, matrix.offset + row * (matrix.columns * width) as u64)?;
        ids.clear();
        matrix.integer.decode(&bytes, ids);
        let outside = |id: &i64| {
            let ignored = tensor == "labels" && *id == i64::from(IGNORED);
            !ignored && usize::try_from(*id).map_or(true, |id| id >= self.vocabulary)
        };
        match ids.iter().position(outside) {
            None => Ok(()),
            Some(column) => Err(Error::OutOfVocabulary {
                path: file.file.path.clone(),
                place: format!("row {row}, column {column} of {tensor:?}"),
                id: ids[column],
                vocabulary: self.vocabulary,
            }),
        }
    }
}

/// Ids that have been checked, as the kernels want them.
fn fill(to: &mut [i32], ids: &[i64]) {
    for (to, &id) in to.iter_mut().zip(ids) {
        *to = id as i32;
    }
}
