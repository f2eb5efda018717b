//! Pictures in folders, PNG and JPEG: each folder is a class, and classes are numbered in the order of their names.
//! A picture is decoded when it is asked for, as RGB, and scaled so that its shorter side is the model's size;
//! what of it a sample shows is decided by whoever reads it. Decoded pictures are kept up to a bound.

use crate::error::{Error, Result};
use crate::source::{Kind, Source, SourceFile};
use image::imageops::FilterType;
use image::{ImageFormat, ImageReader, Limits, RgbImage};
use std::collections::HashMap;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of decoded pictures that are kept. An epoch meets each picture once, so there is nothing to gain from giving
/// one up for another: the first ones stay.
pub(crate) const KEPT_BYTES_MAX: u64 = 256 << 20;

/// Bytes that decoding one picture may take.
const DECODED_BYTES_MAX: u64 = 512 << 20;

/// How many times longer than wide a picture may be: its scaled copy has as many times the model's pixels.
const ASPECT_MAX: u32 = 100;

/// Folders within a class's folder that are followed, as for other sources.
const DEPTH_MAX: usize = 16;

/// Endings of pictures that are not read: to pass over them would be to train on less than is there.
const OTHER_ENDINGS: [&str; 8] = ["gif", "webp", "bmp", "tif", "tiff", "avif", "heic", "jp2"];

/// A decoded picture: rows of pixels, three bytes each.
#[derive(Debug)]
pub(crate) struct Picture {
    pub rows: usize,
    pub columns: usize,
    pub pixels: Vec<u8>,
}

/// One picture on disk.
#[derive(Debug)]
struct Stored {
    path: Box<Path>,
    label: i32,
}

/// The pictures of a folder, in the order of their paths.
#[derive(Debug)]
pub(crate) struct Pictures {
    stored: Vec<Stored>,
    /// The names of all classes, in the order of their numbers.
    pub classes: Vec<String>,
    /// Rows and columns that the model takes.
    size: u32,
    kept: Mutex<Kept>,
}

/// Decoded pictures by number.
#[derive(Debug, Default)]
struct Kept {
    pictures: HashMap<u64, Arc<Picture>>,
    bytes: u64,
}

/// The files of a class's folder.
struct Class {
    folder: PathBuf,
    name: String,
    files: Vec<PathBuf>,
}

impl Pictures {
    /// The pictures in the folder `path`; none where it is no folder, or holds no pictures. `known` are the classes
    /// that another folder has, whose numbers this one's names are given then; else there must be as many as the
    /// model has, `classes`.
    pub fn find(
        path: &Path,
        known: Option<&[String]>,
        classes: usize,
        size: usize,
    ) -> Result<Option<(Pictures, Source)>> {
        if !path.is_dir() {
            return Ok(None);
        }
        let Some(found) = find_classes(path)? else { return Ok(None) };
        let names = match known {
            Some(known) => known.to_vec(),
            None => found.iter().map(|class| class.name.clone()).collect(),
        };
        if names.len() != classes {
            return Err(Error::ClassCount { folder: path.into(), found: names.len(), classes });
        }
        let (mut stored, mut files) = (Vec::new(), Vec::new());
        for class in found {
            let Some(label) = names.iter().position(|name| *name == class.name) else {
                return Err(Error::UnknownClass { folder: class.folder, known: names });
            };
            for path in class.files {
                let label = label as i32;
                stored.push(Stored { path: path.clone().into(), label });
                files.push(SourceFile::look_at(path)?);
            }
        }
        let source = Source { path: path.into(), kind: Kind::Pictures, files };
        let pictures =
            Pictures { stored, classes: names, size: size as u32, kept: Mutex::new(Kept::default()) };
        Ok(Some((pictures, source)))
    }

    pub fn count(&self) -> u64 {
        self.stored.len() as u64
    }

    pub fn label(&self, index: u64) -> i32 {
        self.stored[index as usize].label
    }

    /// Picture `index`, scaled.
    pub fn read(&self, index: u64) -> Result<Arc<Picture>> {
        if let Some(picture) = self.kept().pictures.get(&index) {
            return Ok(picture.clone());
        }
        let picture = Arc::new(self.decode(index)?.0);
        let bytes = picture.pixels.len() as u64;
        let mut kept = self.kept();
        // Another thread may have read the same one meanwhile.
        if kept.bytes + bytes <= KEPT_BYTES_MAX && kept.pictures.insert(index, picture.clone()).is_none() {
            kept.bytes += bytes;
        }
        Ok(picture)
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        // Whole pictures go in and come out: a thread that died has left nothing half done.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Picture `index`, scaled, and the hash of its file.
    pub fn decode(&self, index: u64) -> Result<(Picture, blake3::Hash)> {
        let path = &self.stored[index as usize].path;
        let bytes = std::fs::read(path).map_err(|cause| Error::io("read", path, cause))?;
        let picture = scaled(decode(path, &bytes)?, self.size, path)?;
        Ok((picture, blake3::hash(&bytes)))
    }
}

/// The classes of a folder; none where there is not one picture.
fn find_classes(folder: &Path) -> Result<Option<Vec<Class>>> {
    let (mut classes, mut tensors, mut outside) = (Vec::new(), None, None);
    for path in entries(folder)? {
        if !path.is_dir() {
            match ending(&path).as_deref() {
                Some("png" | "jpg" | "jpeg") => outside = outside.or(Some(path)),
                Some("safetensors") => tensors = tensors.or(Some(path)),
                _ => {}
            }
            continue;
        }
        let mut files = Vec::new();
        collect(&path, 0, &mut files, &mut tensors)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        classes.push(Class { folder: path, name, files });
    }
    let first = classes.iter().flat_map(|class| class.files.first()).next();
    let Some(first) = first else {
        return outside.map_or(Ok(None), |path| Err(Error::NoClassFolder { path, folder: folder.into() }));
    };
    if let Some(second) = tensors {
        return Err(Error::MixedKinds { folder: folder.into(), first: first.clone(), second });
    }
    if let Some(path) = outside {
        return Err(Error::NoClassFolder { path, folder: folder.into() });
    }
    if let Some(class) = classes.iter().find(|class| class.files.is_empty()) {
        return Err(Error::EmptyClass { folder: class.folder.clone() });
    }
    Ok(Some(classes))
}

/// What a folder holds, sorted, without what is hidden.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |cause| Error::io("list", folder, cause);
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

fn ending(path: &Path) -> Option<String> {
    Some(path.extension()?.to_str()?.to_ascii_lowercase())
}

/// Gathers the pictures under a class's folder, and the first file of tensors. Notes and the like are passed over.
fn collect(
    folder: &Path,
    depth: usize,
    files: &mut Vec<PathBuf>,
    tensors: &mut Option<PathBuf>,
) -> Result<()> {
    if depth > DEPTH_MAX {
        return Err(Error::TooDeep { folder: folder.into(), depth_max: DEPTH_MAX });
    }
    for path in entries(folder)? {
        if path.is_dir() {
            collect(&path, depth + 1, files, tensors)?;
            continue;
        }
        match ending(&path).as_deref() {
            Some("png" | "jpg" | "jpeg") => files.push(path),
            Some("safetensors") => *tensors = tensors.take().or(Some(path)),
            Some(other) if OTHER_ENDINGS.contains(&other) => {
                let found = format!("a .{other} file");
                return Err(Error::PictureKind { path, found });
            }
            _ => {}
        }
    }
    Ok(())
}

/// The picture in a file's bytes, by what they are and not by the file's name.
fn decode(path: &Path, bytes: &[u8]) -> Result<RgbImage> {
    if bytes.is_empty() {
        return Err(Error::Empty { path: path.into() });
    }
    let format = match image::guess_format(bytes) {
        Ok(format @ (ImageFormat::Png | ImageFormat::Jpeg)) => format,
        Ok(other) => return Err(Error::PictureKind { path: path.into(), found: format!("{other:?}") }),
        Err(_) => return Err(Error::PictureKind { path: path.into(), found: "no known kind".into() }),
    };
    let failed = |message: String| Error::Picture { path: path.into(), message };
    // The decoder would fill up with grey.
    if format == ImageFormat::Jpeg && !jpeg_ends(bytes) {
        return Err(failed("it ends too soon".into()));
    }
    let mut limits = Limits::default();
    limits.max_alloc = Some(DECODED_BYTES_MAX);
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    reader.limits(limits);
    Ok(reader.decode().map_err(|error| failed(error.to_string()))?.into_rgb8())
}

/// Whether a JPEG has its end marker. It may not be looked for from the file's end, where cameras append things, nor
/// before the image's own data begins, where thumbnails have one of theirs.
fn jpeg_ends(bytes: &[u8]) -> bool {
    const START_OF_SCAN: u8 = 0xda;
    const END: [u8; 2] = [0xff, 0xd9];
    let mut at = 2;
    while let Some(&[0xff, marker]) = bytes.get(at..at + 2) {
        let Some(length) = bytes.get(at + 2..at + 4) else { return false };
        if marker == START_OF_SCAN {
            // In its data a byte 0xff is followed by 0 or by a marker that restarts it.
            return bytes[at..].windows(2).any(|pair| pair == END);
        }
        // A marker may be preceded by any number of 0xff.
        at += if marker == 0xff { 1 } else { 2 + usize::from(u16::from_be_bytes([length[0], length[1]])) };
    }
    false
}

/// The picture with a shorter side of `size`: averaged where it shrinks, as Pillow's bilinear filter does.
fn scaled(image: RgbImage, size: u32, path: &Path) -> Result<Picture> {
    let (width, height) = image.dimensions();
    let (short, long) = (width.min(height), width.max(height));
    if short == 0 || long / short >= ASPECT_MAX {
        return Err(Error::PictureShape { path: path.into(), width, height });
    }
    let scale = |side: u32| (u64::from(side) * u64::from(size) / u64::from(short)) as u32;
    let image = match short == size {
        true => image,
        false => image::imageops::resize(&image, scale(width), scale(height), FilterType::Triangle),
    };
    let (rows, columns) = (image.height() as usize, image.width() as usize);
    Ok(Picture { rows, columns, pixels: image.into_raw() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jpegs_end_is_found_behind_a_thumbnails_and_before_what_cameras_append() {
        let segment = |marker: u8, data: &[u8]| {
            [&[0xff, marker][..], &(data.len() as u16 + 2).to_be_bytes(), data].concat()
        };
        let thumbnail = segment(0xe1, &[0xff, 0xd8, 1, 0xff, 0xd9]);
        let scan = segment(0xda, &[1, 2]);
        let whole =
            [&[0xff, 0xd8][..], &thumbnail, &scan, &[7, 0xff, 0, 7], &[0xff, 0xd9], b"appended"].concat();
        assert!(jpeg_ends(&whole));
        let cut = &whole[..whole.len() - 10];
        assert!(!jpeg_ends(cut));
        assert!((0..cut.len()).all(|length| !jpeg_ends(&cut[..length])));
    }
}
