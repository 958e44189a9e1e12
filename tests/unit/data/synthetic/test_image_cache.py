from facetrain.data.synthetic.image_cache import ImageCache


def test_the_cache_keeps_images_that_fit_into_a_slot(tmp_path):
    cache = ImageCache.create(tmp_path / "new" / "data", slot_size=20)
    cache.put(7, b"sixteen letters.")
    cache.put(3, b"seventeen letters")
    assert [cache.get(number) for number in (7, 3, 0, 9)] == [b"sixteen letters.", None, None, None]


def test_there_is_no_cache_where_no_file_can_be_written(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert ImageCache.create(tmp_path / "file" / "data", slot_size=20) is None
